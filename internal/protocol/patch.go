// SPDX-License-Identifier: Apache-2.0

package protocol

import (
	"encoding/json"
	"fmt"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
)

// op is an operation of a JSON patch (RFC 6902).
type op struct {
	Op    string `json:"op"`
	Path  string `json:"path"`
	From  string `json:"from,omitempty"`
	Value any    `json:"value,omitzero"`
}

func test(path string, value any) op    { return op{Op: "test", Path: path, Value: value} }
func add(path string, value any) op     { return op{Op: "add", Path: path, Value: value} }
func replace(path string, value any) op { return op{Op: "replace", Path: path, Value: value} }
func remove(path string) op             { return op{Op: "remove", Path: path} }

// Patch is the transition as a JSON patch for the subresource status, and the lease that Apply makes of it.
//
// The API server applies a patch to the object as it is then, again on every conflict; so the patch tests
// what it was decided on, and fails at once, with nothing changed, on a state that was not judged. The
// tests are on numbers and ASCII only, because the API server compares bytes.
func Patch(l *v1alpha1.FencedLease, t Transition) (patch []byte, next *v1alpha1.FencedLease, err error) {
	next, err = Apply(l, t)
	if err != nil {
		return nil, nil, err
	}
	var ops []op
	switch t.kind {
	case KindInitialise:
		ops = []op{test("/metadata/resourceVersion", l.ResourceVersion), add("/status", next.Status)}
	case KindAcquire:
		ops = append(testTerm(l), grantOps(next)...)
	case KindGrant:
		ops = append(testTerm(l), append(queueOps(next), grantOps(next)...)...)
	case KindRelease, KindEnd, KindEndCooldown:
		ops = append(testTerm(l), endOps(l, next)...)
	case KindQueue:
		// Not the token: a holder who is faster than the controller must not starve the queue.
		ops = append([]op{test("/status/phase", l.Status.Phase)}, testQueue(l.Status.Queue)...)
		ops = append(ops, queueOps(next)...)
	case KindObserve:
		ops = []op{
			test("/metadata/generation", l.Generation),
			add("/status/observedGeneration", next.Status.ObservedGeneration),
			add("/status/conditions", next.Status.Conditions),
		}
	}
	patch, err = json.Marshal(ops)
	if err != nil {
		return nil, nil, fmt.Errorf("encode %s: %w", t, err)
	}
	return patch, next, nil
}

// testTerm pins the term: token and phase together determine holder, handovers and terms.
func testTerm(l *v1alpha1.FencedLease) []op {
	return []op{test("/status/token", l.Status.Token), test("/status/phase", l.Status.Phase)}
}

// testQueue pins the queue's elements. One that was added behind them is not noticed: its session still
// says that it waits, so the controller adds it again.
func testQueue(queue []v1alpha1.Contender) []op {
	if len(queue) == 0 {
		return []op{test("/status/queue", []v1alpha1.Contender{})}
	}
	var ops []op
	for i, c := range queue {
		ops = append(ops,
			test(fmt.Sprintf("/status/queue/%d/sessionUID", i), c.SessionUID),
			test(fmt.Sprintf("/status/queue/%d/ticket", i), c.Ticket))
	}
	return ops
}

func queueOps(next *v1alpha1.FencedLease) []op {
	return []op{replace("/status/queue", next.Status.Queue), replace("/status/waiting", next.Status.Waiting)}
}

func grantOps(next *v1alpha1.FencedLease) []op {
	return []op{
		replace("/status/token", next.Status.Token),
		replace("/status/phase", next.Status.Phase),
		replace("/status/handovers", next.Status.Handovers),
		add("/status/holder", next.Status.Holder),
	}
}

// endOps are the operations of a term or a cooldown that ends, with whatever comes after it.
func endOps(l, next *v1alpha1.FencedLease) []op {
	var ops []op
	if l.Status.Holder != nil {
		ops = append(ops, add("/status/terms/0", next.Status.Terms[0]))
		if len(l.Status.Terms) == v1alpha1.MaxTerms {
			ops = append(ops, remove(fmt.Sprintf("/status/terms/%d", v1alpha1.MaxTerms)))
		}
	}
	if l.Status.CooldownUntil != nil {
		ops = append(ops, remove("/status/cooldownUntil"))
	}
	switch next.Status.Phase {
	case v1alpha1.PhaseHeld:
		// Only the head is pinned: who joins behind it changes nothing. Its number of waiters is, because
		// it is counted down.
		ops = append(ops, testQueue(l.Status.Queue[:1])...)
		ops = append(ops, test("/status/waiting", l.Status.Waiting), remove("/status/queue/0"),
			replace("/status/waiting", next.Status.Waiting))
		return append(ops, grantOps(next)...)
	case v1alpha1.PhaseCooldown:
		ops = append(ops, add("/status/cooldownUntil", next.Status.CooldownUntil))
	case v1alpha1.PhaseAvailable:
		ops = append(ops, testQueue(nil)...)
	}
	if l.Status.Holder != nil {
		ops = append(ops, remove("/status/holder"))
	}
	return append(ops, replace("/status/phase", next.Status.Phase))
}
