// SPDX-License-Identifier: Apache-2.0

package install

import (
	"fmt"
	"slices"
	"strings"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// serves says of a resource in which form it is served.
type serves struct {
	// main: in any version; status: in every version that has the main one.
	main, status bool
}

// guarded is what the rules of the webhook send to the guard: for each resource and subresource, "" being the main
// one, the operations.
type guarded map[schema.GroupResource]map[string][]string

// readRules reads the rules, and says which of them name what cannot be guarded.
func readRules(rules []admissionregistrationv1.RuleWithOperations) (guarded, []string) {
	all, wrong := guarded{}, []string{}
	for _, rule := range rules {
		for _, group := range rule.APIGroups {
			for _, path := range rule.Resources {
				resource, sub, _ := strings.Cut(path, "/")
				name := schema.GroupResource{Group: group, Resource: resource}
				if reason := unguardable(name, sub); reason != "" {
					wrong = append(wrong, fmt.Sprintf("its rules list %s, %s", strings.TrimSuffix(name.String()+"/"+sub, "/"), reason))
					continue
				}
				if all[name] == nil {
					all[name] = map[string][]string{}
				}
				for _, operation := range rule.Operations {
					all[name][sub] = append(all[name][sub], string(operation))
				}
			}
		}
	}
	return all, wrong
}

// unguardable says why a resource cannot be guarded; empty: it can.
func unguardable(r schema.GroupResource, sub string) string {
	core := []string{"pods", "events", "nodes", "namespaces", "bindings", "endpoints"}
	switch {
	case r.Group == "*" || r.Resource == "*" || sub == "*":
		return "a star, which takes in what cannot be guarded: name the resources"
	case r.Group == "fencedlease.dev", r.Group == "coordination.k8s.io", r.Group == "events.k8s.io", r.Group == "" && slices.Contains(core, r.Resource):
		return "which cannot be guarded: the cluster, or the leases themselves, would wait for the guard"
	case sub != "" && sub != "status":
		return "a subresource that this release does not judge"
	}
	return ""
}

// gaps says which writes to what the rules list would pass by the guard.
func (g guarded) gaps(served func(schema.GroupResource) serves) []string {
	missing := []string{}
	configMaps := schema.GroupResource{Resource: "configmaps"}
	if g[configMaps] == nil {
		missing = append(missing, "its rules lack configmaps")
	}
	for name, subs := range g {
		s := served(name)
		if !s.main {
			continue // not installed, so not written either
		}
		missing = append(missing, lacksOperations(name.String(), subs[""], "CREATE", "UPDATE")...)
		if s.status {
			missing = append(missing, lacksOperations(name.String()+"/status", subs["status"], "UPDATE")...)
		}
	}
	slices.Sort(missing)
	return missing
}

func lacksOperations(name string, have []string, want ...string) []string {
	var missing []string
	for _, operation := range want {
		if !slices.Contains(have, operation) && !slices.Contains(have, "*") {
			missing = append(missing, fmt.Sprintf("its rules lack %s of %s", operation, name))
		}
	}
	return missing
}
