// SPDX-License-Identifier: Apache-2.0

package testenv

import (
	"context"
	"fmt"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
)

// tokenSeconds outlives any test run: nobody renews these tokens.
const tokenSeconds int64 = 24 * 60 * 60

// As returns a configuration that impersonates user, whose groups are these and system:authenticated.
func (e *Env) As(user string, groups ...string) *rest.Config {
	cfg := e.Config()
	cfg.Impersonate = rest.ImpersonationConfig{UserName: user, Groups: groups}
	return cfg
}

// ServiceAccount creates the service account unless it exists, and returns a configuration with a token of it. The
// namespace must exist.
func (e *Env) ServiceAccount(ctx context.Context, namespace, name string) (*rest.Config, error) {
	if err := e.ensureServiceAccount(ctx, namespace, name); err != nil {
		return nil, err
	}
	return e.withToken(ctx, namespace, name, nil)
}

// Pod creates the service account and the Pod unless they exist, and returns the Pod with a configuration whose token
// is bound to it, as the token in a running Pod would be: the API server puts the Pod's name and UID into
// userInfo.extra, and refuses the token once the Pod is gone. There is no kubelet, so the Pod stays Pending.
func (e *Env) Pod(ctx context.Context, namespace, serviceAccount, name string) (*rest.Config, *corev1.Pod, error) {
	if err := e.ensureServiceAccount(ctx, namespace, serviceAccount); err != nil {
		return nil, nil, err
	}
	pods := e.client.CoreV1().Pods(namespace)
	mountToken := false // the admission plugin would add a volume that only a kubelet can fill
	pod, err := pods.Create(ctx, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PodSpec{
			ServiceAccountName:           serviceAccount,
			AutomountServiceAccountToken: &mountToken,
			Containers:                   []corev1.Container{{Name: "main", Image: "none"}},
		},
	}, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		pod, err = pods.Get(ctx, name, metav1.GetOptions{})
	}
	if err != nil {
		return nil, nil, fmt.Errorf("create pod %s/%s: %w", namespace, name, err)
	}
	cfg, err := e.withToken(ctx, namespace, serviceAccount, &authenticationv1.BoundObjectReference{
		APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID,
	})
	return cfg, pod, err
}

func (e *Env) ensureServiceAccount(ctx context.Context, namespace, name string) error {
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: name}}
	_, err := e.client.CoreV1().ServiceAccounts(namespace).Create(ctx, account, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("create service account %s/%s: %w", namespace, name, err)
	}
	return nil
}

func (e *Env) withToken(ctx context.Context, namespace, account string, bound *authenticationv1.BoundObjectReference) (*rest.Config, error) {
	seconds := tokenSeconds
	answer, err := e.client.CoreV1().ServiceAccounts(namespace).CreateToken(ctx, account, &authenticationv1.TokenRequest{
		Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: &seconds, BoundObjectRef: bound},
	}, metav1.CreateOptions{})
	if err != nil {
		return nil, fmt.Errorf("request a token of service account %s/%s: %w", namespace, account, err)
	}
	cfg := rest.AnonymousClientConfig(e.admin)
	cfg.BearerToken = answer.Status.Token
	return cfg, nil
}
