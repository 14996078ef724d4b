// SPDX-License-Identifier: Apache-2.0

package certs

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
)

// Keys of the Secret: PEM blocks, the oldest first, in the same order.
const (
	certsKey = "ca.crt"
	keysKey  = "ca.key"
)

// errElsewhere: another replica was faster. Looking again shows what it did.
var errElsewhere = errors.New("another replica wrote it first")

// loadAuthority returns the authority in the Secret, after bringing it up to date. Replicas do not agree on who
// does that: the first one wins, and the others take what it wrote.
func (m *managed) loadAuthority(ctx context.Context) (authority, error) {
	const tries = 5
	var err error
	for range tries {
		var a authority
		if a, err = m.tryLoad(ctx); !errors.Is(err, errElsewhere) {
			return a, err
		}
	}
	return nil, err
}

func (m *managed) tryLoad(ctx context.Context) (authority, error) {
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: m.Namespace, Name: m.Secret}}
	var a authority
	err := m.Client.Get(ctx, client.ObjectKeyFromObject(secret), secret)
	switch {
	case apierrors.IsNotFound(err):
	case err != nil:
		return nil, fmt.Errorf("read Secret %s/%s with the webhook's authority: %w", m.Namespace, m.Secret, err)
	default:
		if a, err = parseAuthority(secret.Data[certsKey], secret.Data[keysKey]); err != nil {
			log.FromContext(ctx).Info("Replacing the webhook's authority, which is damaged", "secret", m.Secret, "cause", err.Error())
			a = nil
		}
	}
	renewed, changed, err := a.renew(m.Clock.Now(), m.lives.authority)
	if err != nil {
		return nil, fmt.Errorf("make a new authority for the webhook: %w", err)
	}
	if !changed {
		return renewed, nil
	}
	return renewed, m.store(ctx, secret, renewed)
}

// store writes the authority over the Secret as it was read.
func (m *managed) store(ctx context.Context, secret *corev1.Secret, a authority) error {
	certs, keys, err := a.encode()
	if err != nil {
		return err
	}
	if secret.Data == nil {
		secret.Data = map[string][]byte{}
	}
	secret.Data[certsKey], secret.Data[keysKey] = certs, keys
	if secret.ResourceVersion == "" {
		err = m.Client.Create(ctx, secret)
	} else {
		err = m.Client.Update(ctx, secret)
	}
	switch {
	case apierrors.IsAlreadyExists(err), apierrors.IsConflict(err), apierrors.IsNotFound(err) && secret.ResourceVersion != "":
		return errElsewhere
	case err != nil:
		return fmt.Errorf("write Secret %s/%s with the webhook's authority: %w", m.Namespace, m.Secret, err)
	}
	log.FromContext(ctx).Info("Renewed the webhook's authority", "secret", m.Secret, "authorities", len(a))
	return nil
}

// inject makes the caBundle of each webhook in the configuration the authority's certificates.
func (m *managed) inject(ctx context.Context, a authority) error {
	bundle, _, err := a.encode()
	if err != nil {
		return err
	}
	configuration := &admissionregistrationv1.MutatingWebhookConfiguration{}
	if err := m.Client.Get(ctx, client.ObjectKey{Name: m.Configuration}, configuration); err != nil {
		return fmt.Errorf("read MutatingWebhookConfiguration %q, to see its caBundle: %w", m.Configuration, err)
	}
	// A patch of just these fields: an update by the types that we know would drop fields that we do not know.
	ops := []operation{{Op: "test", Path: "/metadata/resourceVersion", Value: configuration.ResourceVersion}}
	for i, webhook := range configuration.Webhooks {
		if !bytes.Equal(webhook.ClientConfig.CABundle, bundle) {
			ops = append(ops, operation{Op: "add", Path: fmt.Sprintf("/webhooks/%d/clientConfig/caBundle", i), Value: bundle})
		}
	}
	if len(ops) == 1 {
		return nil
	}
	patch, err := json.Marshal(ops)
	if err != nil {
		return err
	}
	if err := m.Client.Patch(ctx, configuration, client.RawPatch(types.JSONPatchType, patch)); err != nil {
		return fmt.Errorf("write the caBundle of MutatingWebhookConfiguration %q: %w", m.Configuration, err)
	}
	log.FromContext(ctx).Info("Wrote the caBundle", "configuration", m.Configuration, "authorities", len(a))
	return nil
}

// operation is one step of a JSON patch.
type operation struct {
	Op    string `json:"op"`
	Path  string `json:"path"`
	Value any    `json:"value"`
}
