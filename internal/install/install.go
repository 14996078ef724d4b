// SPDX-License-Identifier: Apache-2.0

// Package install knows what this release needs of the cluster, and says what of it is missing: fields and rules of
// the definition, policies, their bindings, the webhook configuration. Without them the fence has holes, so a manager
// is not ready while anything lacks. More than this release knows is fine.
//
// To become ready, a manager must find everything as its own release has it: a definition that an upgrade left
// behind, with an older text of a rule, counts as missing. To stay ready, it is enough that each rule, validation
// and condition is there by its message or name: a newer release may have refined it, and the replicas of the old
// one must go on until those of the new one are there. Only a definite answer changes anything: while the API server
// cannot be asked, the last answer stands, so that its outage does not become one of the webhook's.
//
// Not judged: namespaceSelector (some providers add one to every webhook, and an administrator may leave out
// namespaces; objects there are not fenced), timeouts, and where the webhook is.
package install

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/log"
)

const (
	// lookAgain is the time between two looks, lookSoon while something is missing: a person may be waiting.
	lookAgain, lookSoon = 10 * time.Second, 2 * time.Second
	// lookWithin bounds one look.
	lookWithin = 5 * time.Second
)

// Checker compares what is installed with what this release needs. Its methods may be called concurrently.
type Checker struct {
	wanted    []*unstructured.Unstructured
	client    dynamic.Interface
	discovery rest.Interface

	mu      sync.RWMutex
	found   answer
	ready   bool  // whether nothing was missing at the last definite look
	failure error // why the last look gave no answer
}

// answer is what a look found.
type answer struct {
	known   bool
	missing []string
	status  map[schema.GroupResource]bool
}

// New returns a checker for the manifests of this release.
func New(cfg *rest.Config, manifests fs.FS) (*Checker, error) {
	wanted, err := readWanted(manifests)
	if err != nil {
		return nil, fmt.Errorf("read the manifests of this release: %w", err)
	}
	own := rest.CopyConfig(cfg)
	own.QPS, own.Timeout = -1, lookWithin
	client, err := dynamic.NewForConfig(own)
	if err != nil {
		return nil, fmt.Errorf("make client to see what is installed: %w", err)
	}
	disco, err := discovery.NewDiscoveryClientForConfig(own)
	if err != nil {
		return nil, fmt.Errorf("make client to see what is served: %w", err)
	}
	return &Checker{wanted: wanted, client: client, discovery: disco.RESTClient()}, nil
}

// Start looks again and again until ctx ends.
func (c *Checker) Start(ctx context.Context) error {
	logger := log.FromContext(ctx).WithName("install")
	said := ""
	for {
		c.Look(ctx)
		wait := lookAgain
		err := c.Ready(nil)
		if err != nil {
			wait = lookSoon
		}
		if now := fmt.Sprint(err); now != said && ctx.Err() == nil {
			said = now
			if err != nil {
				logger.Info("Not ready", "cause", said)
			} else {
				logger.Info("All that this release needs is installed")
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(wait):
		}
	}
}

// Ready is a health check. It names what is missing.
func (c *Checker) Ready(*http.Request) error {
	c.mu.RLock()
	defer c.mu.RUnlock()
	switch {
	case !c.found.known:
		return errors.Join(errors.New("not known yet whether all that this release needs is installed"), c.failure)
	case len(c.found.missing) > 0:
		return fmt.Errorf("this release needs more than is installed, apply its manifests: %s", strings.Join(c.found.missing, "; "))
	}
	return nil
}

// HasStatus says whether the API server serves /status of a resource, in all versions, and the rules send it to the
// guard. False until that is known.
func (c *Checker) HasStatus(resource schema.GroupResource) bool {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.found.status[resource]
}

// Look looks once. Without an answer, the last one stands.
func (c *Checker) Look(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, lookWithin)
	defer cancel()
	d := exactly
	c.mu.RLock()
	if c.ready {
		d = byName
	}
	c.mu.RUnlock()

	found, err := c.look(ctx, d)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.failure = err
	if err == nil {
		c.found = found
		c.ready = len(found.missing) == 0
	}
}

func (c *Checker) look(ctx context.Context, d depth) (answer, error) {
	found := answer{known: true, status: map[schema.GroupResource]bool{}}
	for _, want := range c.wanted {
		name := fmt.Sprintf("%s %q", want.GetKind(), want.GetName())
		resource, _ := resourceOf(want.GetKind())
		have, err := c.client.Resource(resource).Get(ctx, want.GetName(), metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			found.missing = append(found.missing, name+" does not exist")
			continue
		}
		if err != nil {
			return answer{}, fmt.Errorf("read %s: %w", name, err)
		}
		for _, sentence := range lacks(substance(want), substance(have), "", d) {
			found.missing = append(found.missing, name+": "+sentence)
		}
		if want.GetKind() != webhookKind {
			continue
		}
		sentences, err := c.lookAtRules(ctx, have, found.status)
		if err != nil {
			return answer{}, err
		}
		for _, sentence := range sentences {
			found.missing = append(found.missing, name+": "+sentence)
		}
	}
	return found, nil
}

// substance is the part of an object that is compared.
func substance(o *unstructured.Unstructured) fields {
	part := fields{}
	for _, key := range []string{"spec", "webhooks"} {
		if v, ok := o.Object[key]; ok {
			part[key] = v
		}
	}
	return part
}

// lookAtRules judges the rules of the webhook, and notes of which resources /status is guarded.
func (c *Checker) lookAtRules(ctx context.Context, have *unstructured.Unstructured, status map[schema.GroupResource]bool) ([]string, error) {
	configuration := &admissionregistrationv1.MutatingWebhookConfiguration{}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(have.Object, configuration); err != nil {
		return nil, fmt.Errorf("read %s %q: %w", webhookKind, have.GetName(), err)
	}
	var rules []admissionregistrationv1.RuleWithOperations
	for _, webhook := range configuration.Webhooks {
		rules = append(rules, webhook.Rules...)
	}
	listed, wrong := readRules(rules)
	served := map[schema.GroupResource]serves{}
	for name, subs := range listed {
		s, err := c.served(ctx, name)
		if err != nil {
			return nil, err
		}
		served[name] = s
		status[name] = s.status && slices.Contains(subs["status"], "UPDATE")
	}
	return append(wrong, listed.gaps(func(r schema.GroupResource) serves { return served[r] })...), nil
}

// served asks how a resource is served.
func (c *Checker) served(ctx context.Context, r schema.GroupResource) (serves, error) {
	paths := []string{"/api/v1"}
	if r.Group != "" {
		paths = nil
		group := &metav1.APIGroup{}
		if err := c.get(ctx, "/apis/"+r.Group, group); err != nil {
			return serves{}, err
		}
		for _, v := range group.Versions {
			paths = append(paths, "/apis/"+v.GroupVersion)
		}
	}
	s := serves{status: true}
	for _, path := range paths {
		list := &metav1.APIResourceList{}
		if err := c.get(ctx, path, list); err != nil {
			return serves{}, err
		}
		if has(list, r.Resource) {
			s.main = true
			s.status = s.status && has(list, r.Resource+"/status")
		}
	}
	s.status = s.status && s.main
	return s, nil
}

// get reads a document of discovery; one that does not exist leaves it empty.
func (c *Checker) get(ctx context.Context, path string, into runtime.Object) error {
	err := c.discovery.Get().AbsPath(path).Do(ctx).Into(into)
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("see what is served at %s: %w", path, err)
	}
	return nil
}

func has(list *metav1.APIResourceList, name string) bool {
	return slices.ContainsFunc(list.APIResources, func(r metav1.APIResource) bool { return r.Name == name })
}
