// SPDX-License-Identifier: Apache-2.0

package v1alpha1_test

import (
	"fmt"
	"maps"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/internal/protocol"
)

// write is one case: who would take old to next, and how it came about.
type write struct {
	what      string
	old, next map[string]any
}

// tally counts what server and oracle said, and keeps where they differ.
type tally struct {
	allowed, refused int
	differ           []string
	// sole has for a rule, by its message, a write that nothing but this rule refuses.
	sole map[string]write
}

func (t *tally) add(other tally) {
	t.allowed += other.allowed
	t.refused += other.refused
	t.differ = append(t.differ, other.differ...)
	maps.Copy(t.sole, other.sole)
}

// TestDifferential asks the API server's own libraries, loaded with the CRD and the status policy as they are
// installed, and the oracle made of internal/protocol, the same thousands of questions. They must never differ.
//
// Then it plants a weaker CRD, without each of its rules in turn: a question that depends on this rule alone must be
// among those asked, and the answers must differ.
func TestDifferential(t *testing.T) {
	everyRule, err := newServer("")
	if err != nil {
		t.Fatal(err)
	}
	got := judgeAll(everyRule, allWrites())
	report := fmt.Sprintf("differential: %d cases, %d allowed by both, %d refused by both, %d disagreements",
		got.allowed+got.refused+len(got.differ), got.allowed, got.refused, len(got.differ))
	fmt.Println(report)
	for _, d := range got.differ[:min(len(got.differ), 20)] {
		t.Error(d)
	}
	if got.allowed < 1000 || got.refused < 10000 {
		t.Errorf("%s: too few to say anything", report)
	}
	for _, planted := range everyRule.structural.XValidations {
		t.Run("without the rule that "+planted.Message, func(t *testing.T) {
			weaker, err := newServer(planted.Message)
			if err != nil {
				t.Fatal(err)
			}
			w, asked := got.sole[planted.Message]
			if !asked {
				t.Fatal("no case depends on this rule alone: either it is superfluous, or the walk has a gap")
			}
			if got := judge(weaker, w); len(got.differ) == 0 {
				t.Errorf("nobody noticed that this rule was missing: %s", planted.Rule)
			}
		})
	}
}

// TestSpecAndStatusRulesAgree changes the spec under every status: no rule may stand in the way, or an editor could
// not edit a lease that is in use.
func TestSpecAndStatusRulesAgree(t *testing.T) {
	s, err := newServer("")
	if err != nil {
		t.Fatal(err)
	}
	for _, from := range specs {
		for _, old := range states(from) {
			for _, to := range specs {
				next := old.DeepCopy()
				next.Spec.CooldownSeconds, next.Spec.MinToken = to.cooldown, to.minToken
				if errs := s.structure(encode(old), encode(next)); len(errs) > 0 {
					t.Errorf("spec %v to %v, status %s: %v", from, to, summary(encode(old)), errs)
				}
			}
		}
	}
}

// allWrites are a seventh of the pairs of states of one spec, each step of the protocol from each state, and the mutants
// of both: of the first step of each sort, because the product of all would take hours.
var allWrites = sync.OnceValue(func() []write {
	var all []write
	seen := map[string]bool{}
	first := func(sort string) bool { defer func() { seen[sort] = true }(); return !seen[sort] }
	for i, spec := range specs {
		reachable := states(spec)
		for j, l := range reachable {
			old := encode(l)
			for k, other := range reachable {
				if (i+j+k)%7 == 0 {
					all = append(all, write{"to another state", old, encode(other)})
				}
			}
			if first(sort("nothing", l, spec)) {
				all = append(all, mutations("nothing", old, old)...)
			}
			for _, step := range steps(l) {
				next, err := protocol.Apply(l, step)
				if err != nil {
					continue
				}
				all = append(all, write{step.String(), old, encode(next)})
				if first(sort(step.Kind(), l, spec)) {
					all = append(all, mutations(step.String(), old, encode(next))...)
				}
			}
		}
	}
	return all
})

// sort is what makes a step of its own sort to the rules.
func sort(kind protocol.Kind, l *v1alpha1.FencedLease, of spec) string {
	if l.Status == nil {
		return fmt.Sprint(kind, of)
	}
	cooldown := kind == protocol.KindEnd && of.cooldown > 0
	return fmt.Sprint(kind, l.Status.Phase, min(len(l.Status.Queue), 2), len(l.Status.Terms) == v1alpha1.MaxTerms, cooldown)
}

func mutations(what string, old, next map[string]any) []write {
	var all []write
	for _, m := range mutants(next) {
		all = append(all, write{what + ", with " + m.what, old, m.object})
	}
	return all
}

// judgeAll judges on all processors.
func judgeAll(s *server, writes []write) tally {
	total := tally{sole: map[string]write{}}
	var lock sync.Mutex
	var group sync.WaitGroup
	n := runtime.GOMAXPROCS(0)
	for part := range slices.Chunk(writes, len(writes)/n+1) {
		group.Go(func() {
			for _, w := range part {
				got := judge(s, w)
				lock.Lock()
				total.add(got)
				lock.Unlock()
			}
		})
	}
	group.Wait()
	return total
}

// judge compares server and oracle for every requester that could make a difference. A structure that is refused is
// refused to everybody, so that asking for the controller, who may do the most, says it all.
func judge(s *server, w write) tally {
	var got tally
	broken := s.structure(w.old, w.next)
	if len(broken) == 1 {
		got.sole = map[string]write{broken[0].Detail: w}
	}
	structure := broken.ToAggregate()
	everybody := requesters(w)
	if structure != nil {
		everybody = map[string]requester{"the controller": everybody["the controller"]}
	}
	for name, by := range everybody {
		var err error = structure
		if structure == nil {
			err = s.authority(w.old, w.next, by)
		}
		switch want := legal(w.old, w.next, by); {
		case want && err == nil:
			got.allowed++
		case !want && err != nil:
			got.refused++
		default:
			got.differ = append(got.differ, fmt.Sprintf("%s, by %s: the protocol says %t, the API server: %v\n from %s\n to   %s",
				w.what, name, want, err, summary(w.old), summary(w.next)))
		}
	}
	return got
}

// requesters are those whom the policy could tell apart.
func requesters(w write) map[string]requester {
	all := map[string]requester{
		"the controller":        {manages: true},
		"a namespace admin":     {Requester: protocol.Requester{User: "ada"}, rules: true},
		"a thief with the verb": {Requester: protocol.Requester{User: "eve"}, steals: true},
		"a stranger":            {Requester: protocol.Requester{User: "eve"}},
	}
	for when, object := range map[string]map[string]any{"old": w.old, "new": w.next} {
		lease, ok := decode(object)
		if !ok || lease.Status == nil || lease.Status.Holder == nil {
			continue
		}
		self := protocol.Requester{User: lease.Status.Holder.User, PodUID: lease.Status.Holder.PodUID}
		all["the "+when+" holder"] = requester{Requester: self}
		otherPod := self
		otherPod.PodUID = "90d0-other"
		all["another Pod of the "+when+" holder's account"] = requester{Requester: otherPod}
		if self.PodUID != "" {
			noPod := self
			noPod.PodUID = ""
			all["the "+when+" holder's account outside Pods"] = requester{Requester: noPod}
		}
	}
	return all
}

// summary is a status in a line.
func summary(object map[string]any) string {
	lease, _ := decode(object)
	if lease == nil || lease.Status == nil {
		return strings.ReplaceAll(fmt.Sprint(object["status"]), "map", "")
	}
	s := lease.Status
	holder := v1alpha1.Contender{}
	if s.Holder != nil {
		holder = s.Holder.Contender
	}
	return fmt.Sprintf("%s token %d holder %q queue %d waiting %d handovers %d terms %d", s.Phase, s.Token, holder.Identity, len(s.Queue), s.Waiting, s.Handovers, len(s.Terms))
}
