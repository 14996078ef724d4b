// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"fmt"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	authorizationclient "k8s.io/client-go/kubernetes/typed/authorization/v1"
	"k8s.io/client-go/rest"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
)

// accessReviewer asks by SubjectAccessReview, each time anew: rights that were taken away count at once.
type accessReviewer struct {
	reviews authorizationclient.SubjectAccessReviewInterface
}

// NewAccessReviewer returns a reviewer with a client of its own. Its calls are bounded to two seconds.
func NewAccessReviewer(cfg *rest.Config) (AccessReviewer, error) {
	client, err := authorizationclient.NewForConfig(unlimited(cfg))
	if err != nil {
		return nil, fmt.Errorf("make client for access reviews: %w", err)
	}
	return accessReviewer{reviews: client.SubjectAccessReviews()}, nil
}

func (a accessReviewer) Allowed(ctx context.Context, user authenticationv1.UserInfo, verb string, name types.NamespacedName) (bool, error) {
	review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
		User:   user.Username,
		UID:    user.UID,
		Groups: user.Groups,
		Extra:  make(map[string]authorizationv1.ExtraValue, len(user.Extra)),
		ResourceAttributes: &authorizationv1.ResourceAttributes{
			Group:     v1alpha1.GroupVersion.Group,
			Version:   v1alpha1.GroupVersion.Version,
			Resource:  "fencedleases",
			Namespace: name.Namespace,
			Name:      name.Name,
			Verb:      verb,
		},
	}}
	for key, values := range user.Extra {
		review.Spec.Extra[key] = authorizationv1.ExtraValue(values)
	}
	answer, err := a.reviews.Create(ctx, review, metav1.CreateOptions{})
	if err != nil {
		return false, fmt.Errorf("ask whether user %q has the verb %s on lease %s: %w", user.Username, verb, name, err)
	}
	return answer.Status.Allowed, nil
}
