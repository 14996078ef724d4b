// SPDX-License-Identifier: Apache-2.0

package v1alpha1_test

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/internal/protocol"
)

// TestAttacks tries what must not be, and what must, on a real API server with the CRD, policies and roles as they are
// installed. Each row says who would refuse: a rule of the CRD, or a policy.
func TestAttacks(t *testing.T) {
	c := startCluster(t)
	t.Run("status", func(t *testing.T) { testStatus(t, c) })
	t.Run("spec", func(t *testing.T) { testSpec(t, c) })
	t.Run("session", func(t *testing.T) { testSession(t, c) })
	t.Run("the manager's account", func(t *testing.T) { testManager(t, c) })
	t.Run("garbage collector and namespace controller", func(t *testing.T) { testCollectors(t, c) })
}

// statusRow is one write of a status.
type statusRow struct {
	spec  spec
	given []step // what the lease went through before
	none  bool   // the lease has no status
	by    *actor
	write func(l *v1alpha1.FencedLease) edit
	want  verdict
}

// step is a transition of the lease as it stands.
type step = func(l *v1alpha1.FencedLease) protocol.Transition

// edit is a patch of a status.
type edit struct {
	kind types.PatchType
	data []byte
}

// edits are what an attacker changes in a status that would be right.
type edits = func(status map[string]any)

// full writes the whole status that the transition leads to, with something changed.
func full(next step, changes ...edits) func(*v1alpha1.FencedLease) edit {
	return func(l *v1alpha1.FencedLease) edit {
		after, err := protocol.Apply(l, next(l))
		if err != nil {
			panic(err) // the row is wrong
		}
		status := encode(after)["status"].(map[string]any)
		for _, change := range changes {
			change(status)
		}
		return edit{types.JSONPatchType, mustJSON([]map[string]any{{"op": "add", "path": "/status", "value": status}})}
	}
}

// legit writes the patch of the protocol.
func legit(next step) func(*v1alpha1.FencedLease) edit {
	return func(l *v1alpha1.FencedLease) edit {
		patch, _, err := protocol.Patch(l, next(l))
		if err != nil {
			panic(err)
		}
		return edit{types.JSONPatchType, patch}
	}
}

func raw(kind types.PatchType, data string) func(*v1alpha1.FencedLease) edit {
	return func(*v1alpha1.FencedLease) edit { return edit{kind, []byte(data)} }
}

// set changes the value at a path of keys.
func set(value any, path ...string) edits {
	return func(s map[string]any) {
		last := len(path) - 1
		for _, key := range path[:last] {
			switch v := s[key].(type) {
			case map[string]any:
				s = v
			case []any:
				s = v[0].(map[string]any) // lists: the first element
			}
		}
		if value == nil {
			delete(s, path[last])
		} else {
			s[path[last]] = value
		}
	}
}

func testStatus(t *testing.T, c *cluster) {
	for name, row := range mergeRows(rightfulRows(c), authorityRows(c), structureRows(c), handoffRows(c), poisonRows(c)) {
		t.Run(name, func(t *testing.T) {
			l := c.lease(t, row.spec)
			if !row.none {
				l = c.apply(t, l, append([]step{initialise}, row.given...)...)
			}
			w := row.write(l)
			_, err := row.by.leases().Patch(t.Context(), l.Name, w.kind, w.data, metav1.PatchOptions{}, "status")
			row.want.check(t, err)
			after, err := c.admin.leases().Get(t.Context(), l.Name, metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			now := typed(t, after)
			if row.want != stored && now.ResourceVersion != l.ResourceVersion {
				t.Errorf("refused, and stored all the same: %v", now.Status)
			}
			if got, want := after.Object["status"], encode(now)["status"]; row.want == stored && !cmp.Equal(got, want) {
				t.Errorf("stored otherwise than our types write it: %s", cmp.Diff(want, got))
			}
		})
	}
	t.Run("a PUT removes the status", func(t *testing.T) {
		l := c.apply(t, c.lease(t, spec{}), initialise)
		object := encode(l)
		delete(object, "status")
		_, err := c.nora.leases().UpdateStatus(t.Context(), &unstructured.Unstructured{Object: object}, metav1.UpdateOptions{})
		rule("status cannot be removed").check(t, err)
	})
}

func mergeRows(tables ...map[string]statusRow) map[string]statusRow {
	all := map[string]statusRow{}
	for _, table := range tables {
		for name, row := range table {
			if _, twice := all[name]; twice {
				panic("two rows are called " + name)
			}
			all[name] = row
		}
	}
	return all
}

// The lease as the rows find it.
func (c *cluster) held() []step { return []step{acquire(c.holder)} }

func (c *cluster) queued() []step {
	return append(c.held(), always(protocol.Queue([]v1alpha1.Contender{c.rival.contender, c.alice.contender}, 5)))
}

func (c *cluster) cooling() []step {
	return append(c.held(), always(protocol.Queue([]v1alpha1.Contender{c.rival.contender}, 1)), end(v1alpha1.EndExpired))
}

func (c *cluster) longHistory() []step {
	var all []step
	for range v1alpha1.MaxTerms {
		all = append(all, acquire(c.alice), release(c.alice))
	}
	return append(all, c.queued()...)
}

func always(t protocol.Transition) step {
	return func(*v1alpha1.FencedLease) protocol.Transition { return t }
}

func initialise(*v1alpha1.FencedLease) protocol.Transition { return protocol.Initialise(epoch) }

func acquire(a *actor) step { return always(protocol.Acquire(a.contender, epoch)) }

func release(a *actor) step { return always(protocol.Release(a.contender, epoch.Add(time.Hour))) }

func end(reason v1alpha1.EndReason) step {
	return func(l *v1alpha1.FencedLease) protocol.Transition {
		return protocol.End(l.Status.Token, reason, epoch.Add(time.Hour))
	}
}

func rightfulRows(c *cluster) map[string]statusRow {
	queue := always(protocol.Queue([]v1alpha1.Contender{c.rival.contender}, 1))
	grant := always(protocol.Grant(c.rival.contender, []v1alpha1.Contender{c.alice.contender}, 1, epoch))
	return map[string]statusRow{
		"a contender acquires":                     {by: c.rival, write: legit(acquire(c.rival)), want: stored},
		"a contender outside Pods acquires":        {by: c.alice, write: legit(acquire(c.alice)), want: stored},
		"the holder releases":                      {given: c.held(), by: c.holder, write: legit(release(c.holder)), want: stored},
		"the holder hands over":                    {given: c.queued(), by: c.holder, write: legit(release(c.holder)), want: stored},
		"a holder releases and no cooldown begins": {spec: spec{cooldown: 30}, given: c.held(), by: c.holder, write: legit(release(c.holder)), want: stored},
		"an admin steals with the verb":            {given: c.queued(), by: c.lena, write: full(end(v1alpha1.EndStolen)), want: stored},
		"a Role with verbs * steals":               {given: c.held(), by: c.nora, write: full(end(v1alpha1.EndStolen)), want: stored},
		"the controller initialises":               {none: true, by: c.controller, write: legit(initialise), want: stored},
		"the controller initialises at minToken":   {none: true, spec: spec{minToken: 1 << 40}, by: c.controller, write: legit(initialise), want: stored},
		"the controller grants":                    {by: c.controller, write: legit(grant), want: stored},
		"the controller queues":                    {given: c.held(), by: c.controller, write: legit(queue), want: stored},
		"the controller expires":                   {given: c.queued(), by: c.controller, write: full(end(v1alpha1.EndExpired)), want: stored},
		"the controller begins a cooldown":         {spec: spec{cooldown: 30}, given: c.queued(), by: c.controller, write: full(end(v1alpha1.EndMaxHold)), want: stored},
		"the controller ends a cooldown":           {spec: spec{cooldown: 30}, given: c.cooling(), by: c.controller, write: legit(always(protocol.EndCooldown(epoch))), want: stored},
		"the controller reports":                   {given: c.held(), by: c.controller, write: full(always(protocol.Observe(epoch)), set("True", "conditions", "status")), want: stored},
		"an identity of 1024 wide characters":      {by: c.rival, write: full(acquire(c.rival), set(strings.Repeat("😀", 1024), "holder", "identity")), want: stored},
	}
}
