// SPDX-License-Identifier: Apache-2.0

package protocol_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/internal/protocol"
)

// step is a case of the tables below: a lease, a transition, and the lease after it or the error.
type step struct {
	lease   builder
	do      protocol.Transition
	want    builder
	wantErr error
}

// run applies the steps. Whatever comes out, the lease that went in is as it was.
func run(t *testing.T, steps map[string]step) {
	t.Helper()
	for name, tc := range steps {
		t.Run(name, func(t *testing.T) {
			before := tc.lease.DeepCopy()
			got, err := protocol.Apply(tc.lease.FencedLease, tc.do)
			if diff := cmp.Diff(before, tc.lease.FencedLease); diff != "" {
				t.Errorf("Apply changed its argument (-before +after):\n%s", diff)
			}
			if !errors.Is(err, tc.wantErr) || (err == nil) != (tc.wantErr == nil) {
				t.Fatalf("error: got %v, want %v", err, tc.wantErr)
			}
			if diff := cmp.Diff(tc.want.FencedLease, got); diff != "" {
				t.Errorf("lease after %s (-want +got):\n%s", tc.do, diff)
			}
			if again, _ := protocol.Apply(before, tc.do); !cmp.Equal(got, again) {
				t.Errorf("a second Apply to the same lease differs (-first +second):\n%s", cmp.Diff(got, again))
			}
		})
	}
}

func TestInitialise(t *testing.T) {
	exhausted := available().token(v1alpha1.MaxToken).with(func(b builder) {
		b.ResourceVersion = "9007199254740991"
		b.Status.Conditions[0].Status, b.Status.Conditions[0].Reason = metav1.ConditionFalse, v1alpha1.ConditionReasonTokensExhausted
		b.Status.Conditions[0].Message = "The last token below 2^53 was issued. Create a lease of another name and protect the objects with it."
	})
	rv := func(rv string) builder { return fresh().with(func(b builder) { b.ResourceVersion = rv }) }
	run(t, map[string]step{
		"a new lease starts at its own resourceVersion": {
			lease: fresh(), do: protocol.Initialise(noon), want: available()},
		"minToken lifts the start": {
			lease: fresh().minToken(5000), do: protocol.Initialise(noon), want: available().minToken(5000).token(5000)},
		"a minToken below the resourceVersion does not lower it": {
			lease: fresh().minToken(7), do: protocol.Initialise(noon), want: available().minToken(7)},
		"a lease that has a status is not started again": {
			lease: held("a", 7), do: protocol.Initialise(noon), wantErr: protocol.ErrNotReady},
		"the last possible start leaves no token, and says so": {
			lease: rv("9007199254740991"), do: protocol.Initialise(noon), want: exhausted},
		"no resourceVersion seeds nothing":               {lease: rv(""), do: protocol.Initialise(noon), wantErr: protocol.ErrIllegal},
		"resourceVersion 0 seeds nothing":                {lease: rv("0"), do: protocol.Initialise(noon), wantErr: protocol.ErrIllegal},
		"a resourceVersion that is no number seeds none": {lease: rv("abc"), do: protocol.Initialise(noon), wantErr: protocol.ErrIllegal},
		"a resourceVersion beyond 2^53 seeds nothing":    {lease: rv("9007199254740992"), do: protocol.Initialise(noon), wantErr: protocol.ErrIllegal},
	})
}

func TestAcquire(t *testing.T) {
	broken := func(f func(*v1alpha1.Contender)) step {
		c := contender("a", 7)
		f(&c)
		return step{lease: available(), do: protocol.Acquire(c, noon), wantErr: protocol.ErrIllegal}
	}
	run(t, map[string]step{
		"a lease that is being deleted is taken by nobody": {
			lease: available().dying(), do: protocol.Acquire(contender("a", 7), noon), wantErr: protocol.ErrNotAvailable},
		"a free lease is held with the next token": {
			lease: available(), do: protocol.Acquire(contender("a", 7), noon), want: held("a", 7)},
		"a process outside Pods has no Pod UID": {
			lease: available(),
			do:    protocol.Acquire(without(contender("a", 7)), noon),
			want:  held("a", 7).with(func(b builder) { b.Status.Holder.PodUID = "" })},
		"minToken lifts the token": {
			lease: available().minToken(7000), do: protocol.Acquire(contender("a", 7), noon), want: held("a", 7).minToken(7000).token(7000)},
		"a minToken that was passed changes nothing": {
			lease: available().minToken(100), do: protocol.Acquire(contender("a", 7), noon), want: held("a", 7).minToken(100)},
		"a minToken just above changes nothing either": {
			lease: available().minToken(101), do: protocol.Acquire(contender("a", 7), noon), want: held("a", 7).minToken(101)},
		"the last token can be issued": {
			lease: available().token(v1alpha1.MaxToken - 1), do: protocol.Acquire(contender("a", 7), noon), want: held("a", 7).token(v1alpha1.MaxToken)},
		"there is none after it": {
			lease: available().token(v1alpha1.MaxToken), do: protocol.Acquire(contender("a", 7), noon), wantErr: protocol.ErrExhausted},
		"those who wait behind are still counted": {
			lease: available().waiting(3), do: protocol.Acquire(contender("a", 7), noon), want: held("a", 7).waiting(3)},
		"the terms stay": {
			lease: available().history(10), do: protocol.Acquire(contender("a", 7), noon),
			want: held("a", 7).with(func(b builder) { b.Status.Terms = available().history(10).Status.Terms })},
		"a held lease is not available":            {lease: held("b", 1), do: protocol.Acquire(contender("a", 7), noon), wantErr: protocol.ErrNotAvailable},
		"nor to its own holder":                    {lease: held("a", 7), do: protocol.Acquire(contender("a", 7), noon), wantErr: protocol.ErrNotAvailable},
		"one that cools down is not available":     {lease: cooling(), do: protocol.Acquire(contender("a", 7), noon), wantErr: protocol.ErrNotAvailable},
		"a lease without status is not ready":      {lease: fresh(), do: protocol.Acquire(contender("a", 7), noon), wantErr: protocol.ErrNotReady},
		"a contender has an identity":              broken(func(c *v1alpha1.Contender) { c.Identity = "" }),
		"one that fits":                            broken(func(c *v1alpha1.Contender) { c.Identity = strings.Repeat("ä", 1025) }),
		"and is UTF-8, since JSON would change it": broken(func(c *v1alpha1.Contender) { c.Identity = "a\xff" }),
		"a contender has a session":                broken(func(c *v1alpha1.Contender) { c.Session = "" }),
		"whose name fits":                          broken(func(c *v1alpha1.Contender) { c.Session = strings.Repeat("s", 254) }),
		"a contender's session has a UID":          broken(func(c *v1alpha1.Contender) { c.SessionUID = "" }),
		"which fits":                               broken(func(c *v1alpha1.Contender) { c.SessionUID = "0123456789012345678901234567890123456" }),
		"a contender has a user":                   broken(func(c *v1alpha1.Contender) { c.User = "" }),
		"whose name is short enough":               broken(func(c *v1alpha1.Contender) { c.User = strings.Repeat("u", 513) }),
		"a Pod UID is short":                       broken(func(c *v1alpha1.Contender) { c.PodUID = "0123456789012345678901234567890123456" }),
		"a contender has a ticket":                 broken(func(c *v1alpha1.Contender) { c.Ticket = 0 }),
		"which is positive":                        broken(func(c *v1alpha1.Contender) { c.Ticket = -1 }),
		"and below 2^53":                           broken(func(c *v1alpha1.Contender) { c.Ticket = 1 << 53 }),
	})
}

// without is the contender of a process that runs in no Pod.
func without(c v1alpha1.Contender) v1alpha1.Contender { c.PodUID = ""; return c }

func TestGrant(t *testing.T) {
	a, b, c := contender("a", 7), contender("b", 8), contender("c", 9)
	run(t, map[string]step{
		"the only one gets it": {
			lease: available(), do: protocol.Grant(a, nil, 0, noon), want: held("a", 7)},
		"the others queue in the same write": {
			lease: available(), do: protocol.Grant(a, []v1alpha1.Contender{b, c}, 2, noon), want: held("a", 7).queue(b, c)},
		"those beyond the queue are counted": {
			lease: available().waiting(1), do: protocol.Grant(a, []v1alpha1.Contender{b}, 200, noon), want: held("a", 7).queue(b).waiting(200)},
		"a session may queue for what it is about to hold, with another ticket": {
			lease: available(), do: protocol.Grant(a, []v1alpha1.Contender{contender("a", 8)}, 1, noon), want: held("a", 7).queue(contender("a", 8))},
		"a request stands in line once":     {lease: available(), do: protocol.Grant(a, []v1alpha1.Contender{b, b}, 2, noon), wantErr: protocol.ErrIllegal},
		"holder or queue, not both":         {lease: available(), do: protocol.Grant(a, []v1alpha1.Contender{a}, 1, noon), wantErr: protocol.ErrIllegal},
		"waiting counts at least the queue": {lease: available(), do: protocol.Grant(a, []v1alpha1.Contender{b, c}, 1, noon), wantErr: protocol.ErrIllegal},
		"the queue holds eight":             {lease: available(), do: protocol.Grant(a, crowd(9), 9, noon), wantErr: protocol.ErrIllegal},
		"a malformed first is refused":      {lease: available(), do: protocol.Grant(contender("a", 0), nil, 0, noon), wantErr: protocol.ErrIllegal},
		"a malformed second too":            {lease: available(), do: protocol.Grant(a, []v1alpha1.Contender{contender("b", 0)}, 1, noon), wantErr: protocol.ErrIllegal},
		"a held lease is not granted":       {lease: held("b", 1), do: protocol.Grant(a, nil, 0, noon), wantErr: protocol.ErrNotAvailable},
		"nor one that cools down":           {lease: cooling(), do: protocol.Grant(a, nil, 0, noon), wantErr: protocol.ErrNotAvailable},
		"nor one without tokens":            {lease: available().token(v1alpha1.MaxToken), do: protocol.Grant(a, nil, 0, noon), wantErr: protocol.ErrExhausted},
		"nor one without status":            {lease: fresh(), do: protocol.Grant(a, nil, 0, noon), wantErr: protocol.ErrNotReady},
	})
}

// crowd is n requests of sessions c0, c1, ….
func crowd(n int) []v1alpha1.Contender {
	var all []v1alpha1.Contender
	for i := range n {
		all = append(all, contender("c"+string(rune('0'+i)), 1))
	}
	return all
}

// after is the lease once the term of a, ticket 7, has ended and nobody followed.
func after(reason v1alpha1.EndReason) builder {
	return available().token(101).with(func(b builder) {
		b.Status.Handovers = 1
		b.Status.Terms = []v1alpha1.Term{term(101, contender("a", 7), reason)}
	})
}

// followed is the lease once b, ticket 8, has followed a in the same write.
func followed(reason v1alpha1.EndReason) builder {
	return held("b", 8).token(102).with(func(b builder) {
		b.Status.Handovers = 2
		b.Status.Terms = []v1alpha1.Term{term(101, contender("a", 7), reason)}
	})
}

func TestRelease(t *testing.T) {
	a, b, c := contender("a", 7), contender("b", 8), contender("c", 9)
	stranger := func(f func(*v1alpha1.Contender)) step {
		by := a
		f(&by)
		return step{lease: held("a", 7), do: protocol.Release(by, noon), wantErr: protocol.ErrNotHolder}
	}
	run(t, map[string]step{
		"with nobody in line the lease is available": {
			lease: held("a", 7), do: protocol.Release(a, noon), want: after(v1alpha1.EndReleased)},
		"the head of the queue follows in the same write": {
			lease: held("a", 7).queue(b, c), do: protocol.Release(a, noon), want: followed(v1alpha1.EndReleased).queue(c)},
		"those behind the queue are counted down too": {
			lease: held("a", 7).queue(b).waiting(5), do: protocol.Release(a, noon), want: followed(v1alpha1.EndReleased).waiting(4)},
		"a released term never cools down": {
			lease: held("a", 7).cooldown(60), do: protocol.Release(a, noon), want: after(v1alpha1.EndReleased).cooldown(60)},
		"not even with a queue": {
			lease: held("a", 7).cooldown(60).queue(b), do: protocol.Release(a, noon), want: followed(v1alpha1.EndReleased).cooldown(60)},
		"minToken lifts the follower's token": {
			lease: held("a", 7).minToken(900).queue(b), do: protocol.Release(a, noon), want: followed(v1alpha1.EndReleased).minToken(900).token(900)},
		"ten terms are kept": {
			lease: held("a", 7).history(10), do: protocol.Release(a, noon),
			want: after(v1alpha1.EndReleased).with(func(b builder) {
				b.Status.Terms = append(b.Status.Terms, held("a", 7).history(10).Status.Terms[:9]...)
			})},
		"without a token for the follower the queue must go first": {
			lease: held("a", 7).token(v1alpha1.MaxToken).queue(b), do: protocol.Release(a, noon), wantErr: protocol.ErrExhausted},
		"the last term can be released": {
			lease: held("a", 7).token(v1alpha1.MaxToken), do: protocol.Release(a, noon),
			want: after(v1alpha1.EndReleased).token(v1alpha1.MaxToken).with(func(b builder) { b.Status.Terms[0].Token = v1alpha1.MaxToken })},
		"another ticket is another term":   stranger(func(c *v1alpha1.Contender) { c.Ticket = 6 }),
		"another session is another term":  stranger(func(c *v1alpha1.Contender) { c.SessionUID = "uid-other" }),
		"another user is somebody else":    stranger(func(c *v1alpha1.Contender) { c.User = "sa-other" }),
		"another Pod is somebody else":     stranger(func(c *v1alpha1.Contender) { c.PodUID = "pod-other" }),
		"no Pod is somebody else":          stranger(func(c *v1alpha1.Contender) { c.PodUID = "" }),
		"an available lease has no holder": {lease: available(), do: protocol.Release(a, noon), wantErr: protocol.ErrNotHolder},
		"nor has one that cools down":      {lease: cooling(), do: protocol.Release(a, noon), wantErr: protocol.ErrNotHolder},
		"nor one without status":           {lease: fresh(), do: protocol.Release(a, noon), wantErr: protocol.ErrNotReady},
	})
}

func TestEnd(t *testing.T) {
	b, c := contender("b", 8), contender("c", 9)
	cooled := func(reason v1alpha1.EndReason) builder {
		return after(reason).cooldown(5).with(func(b builder) {
			until := metav1.NewMicroTime(at.Add(5 * time.Second))
			b.Status.Phase, b.Status.CooldownUntil = v1alpha1.PhaseCooldown, &until
		})
	}
	steps := map[string]step{
		"the minimum of a cooldown is one second": {
			lease: held("a", 7).cooldown(1), do: protocol.End(101, v1alpha1.EndExpired, noon),
			want: cooled(v1alpha1.EndExpired).cooldown(1).with(func(b builder) {
				until := metav1.NewMicroTime(at.Add(time.Second))
				b.Status.CooldownUntil = &until
			})},
		"without a token for the follower the queue must go first": {
			lease: held("a", 7).token(v1alpha1.MaxToken).queue(b), do: protocol.End(v1alpha1.MaxToken, v1alpha1.EndExpired, noon), wantErr: protocol.ErrExhausted},
		"but a cooldown needs no token": {
			lease: held("a", 7).token(v1alpha1.MaxToken).cooldown(5).queue(b), do: protocol.End(v1alpha1.MaxToken, v1alpha1.EndExpired, noon),
			want: cooled(v1alpha1.EndExpired).token(v1alpha1.MaxToken).queue(b).with(func(b builder) { b.Status.Terms[0].Token = v1alpha1.MaxToken })},
		"an older term has ended already":   {lease: held("a", 7), do: protocol.End(100, v1alpha1.EndExpired, noon), wantErr: protocol.ErrNotHolder},
		"a later term is not known":         {lease: held("a", 7), do: protocol.End(102, v1alpha1.EndExpired, noon), wantErr: protocol.ErrNotHolder},
		"only the holder releases":          {lease: held("a", 7), do: protocol.End(101, v1alpha1.EndReleased, noon), wantErr: protocol.ErrIllegal},
		"an end has a reason":               {lease: held("a", 7), do: protocol.End(101, "", noon), wantErr: protocol.ErrIllegal},
		"an available lease has no term":    {lease: available(), do: protocol.End(100, v1alpha1.EndExpired, noon), wantErr: protocol.ErrNotHolder},
		"one that cools down has ended its": {lease: cooling(), do: protocol.End(101, v1alpha1.EndExpired, noon), wantErr: protocol.ErrNotHolder},
		"a lease without status has none":   {lease: fresh(), do: protocol.End(0, v1alpha1.EndExpired, noon), wantErr: protocol.ErrNotReady},
	}
	for _, reason := range []v1alpha1.EndReason{v1alpha1.EndExpired, v1alpha1.EndSessionClosed, v1alpha1.EndMaxHold, v1alpha1.EndStolen, v1alpha1.EndInvalid} {
		end := protocol.End(101, reason, noon)
		steps[string(reason)+" with nobody in line: available"] = step{lease: held("a", 7), do: end, want: after(reason)}
		steps[string(reason)+" with a queue: the head follows"] = step{lease: held("a", 7).queue(b, c), do: end, want: followed(reason).queue(c)}
		steps[string(reason)+" with a cooldown: nobody gets it, the queue waits"] = step{lease: held("a", 7).cooldown(5).queue(b, c), do: end, want: cooled(reason).queue(b, c)}
	}
	run(t, steps)
}

func TestEndCooldown(t *testing.T) {
	b, c := contender("b", 8), contender("c", 9)
	over := func(l builder) builder {
		l.Status.Phase, l.Status.CooldownUntil = v1alpha1.PhaseAvailable, nil
		return l
	}
	granted := held("b", 8).token(102).cooldown(5).queue(c).with(func(b builder) {
		b.Status.Handovers, b.Status.Terms = 2, cooling().Status.Terms
	})
	run(t, map[string]step{
		"with nobody in line the lease is available": {lease: cooling(), do: protocol.EndCooldown(noon), want: over(cooling())},
		"the head of the queue follows":              {lease: cooling().queue(b, c), do: protocol.EndCooldown(noon), want: granted},
		"without a token the queue must go first":    {lease: cooling().token(v1alpha1.MaxToken).queue(b), do: protocol.EndCooldown(noon), wantErr: protocol.ErrExhausted},
		"a held lease does not cool down":            {lease: held("a", 7), do: protocol.EndCooldown(noon), wantErr: protocol.ErrIllegal},
		"nor an available one":                       {lease: available(), do: protocol.EndCooldown(noon), wantErr: protocol.ErrIllegal},
		"nor one without status":                     {lease: fresh(), do: protocol.EndCooldown(noon), wantErr: protocol.ErrNotReady},
	})
}

func TestQueue(t *testing.T) {
	b, c := contender("b", 8), contender("c", 9)
	both := []v1alpha1.Contender{b, c}
	run(t, map[string]step{
		"sessions queue behind the holder":     {lease: held("a", 7), do: protocol.Queue(both, 2), want: held("a", 7).queue(b, c)},
		"and while the lease cools down":       {lease: cooling(), do: protocol.Queue(both, 2), want: cooling().queue(b, c)},
		"others wait behind the queue":         {lease: held("a", 7), do: protocol.Queue(both, 300), want: held("a", 7).queue(b, c).waiting(300)},
		"the dead are taken out":               {lease: held("a", 7).queue(b, c), do: protocol.Queue(both[1:], 1), want: held("a", 7).queue(c)},
		"all of them":                          {lease: held("a", 7).queue(b, c), do: protocol.Queue(nil, 0), want: held("a", 7).queue([]v1alpha1.Contender{}...)},
		"eight fit":                            {lease: held("a", 7), do: protocol.Queue(crowd(8), 8), want: held("a", 7).queue(crowd(8)...)},
		"nine do not":                          {lease: held("a", 7), do: protocol.Queue(crowd(9), 9), wantErr: protocol.ErrIllegal},
		"waiting counts at least the queue":    {lease: held("a", 7), do: protocol.Queue(both, 1), wantErr: protocol.ErrIllegal},
		"no request waits twice":               {lease: held("a", 7), do: protocol.Queue([]v1alpha1.Contender{b, b}, 2), wantErr: protocol.ErrIllegal},
		"nor does the one that is held":        {lease: held("a", 7), do: protocol.Queue([]v1alpha1.Contender{contender("a", 7)}, 1), wantErr: protocol.ErrIllegal},
		"the holder may wait with a new one":   {lease: held("a", 7), do: protocol.Queue([]v1alpha1.Contender{contender("a", 8)}, 1), want: held("a", 7).queue(contender("a", 8))},
		"a malformed request is refused":       {lease: held("a", 7), do: protocol.Queue([]v1alpha1.Contender{contender("b", 0)}, 1), wantErr: protocol.ErrIllegal},
		"nobody queues for an available lease": {lease: available(), do: protocol.Queue(both, 2), wantErr: protocol.ErrIllegal},
		"but its waiters may be counted anew":  {lease: available().waiting(3), do: protocol.Queue(nil, 0), want: available()},
		"a lease without status has no queue":  {lease: fresh(), do: protocol.Queue(both, 2), wantErr: protocol.ErrNotReady},
	})
}

func TestObserve(t *testing.T) {
	changed := func(b builder) builder { b.Generation = 2; return b }
	seen := func(b builder) builder {
		b.Generation, b.Status.ObservedGeneration, b.Status.Conditions[0].ObservedGeneration = 2, 2, 2
		return b
	}
	later := noon.Add(time.Hour)
	run(t, map[string]step{
		"a changed spec was seen; the condition is as old as it was": {
			lease: changed(held("a", 7)), do: protocol.Observe(later), want: seen(held("a", 7))},
		"a lost condition comes back": {
			lease: held("a", 7).with(func(b builder) { b.Status.Conditions = nil }), do: protocol.Observe(noon), want: held("a", 7)},
		"the last token was issued: not ready, from now on": {
			lease: held("a", 7).token(v1alpha1.MaxToken), do: protocol.Observe(later),
			want: held("a", 7).token(v1alpha1.MaxToken).with(func(b builder) {
				c := &b.Status.Conditions[0]
				c.Status, c.Reason = metav1.ConditionFalse, v1alpha1.ConditionReasonTokensExhausted
				c.Message = "The last token below 2^53 was issued. Create a lease of another name and protect the objects with it."
				c.LastTransitionTime = metav1.NewTime(later.Truncate(time.Second))
			})},
		"a lease without status was not taken up": {lease: fresh(), do: protocol.Observe(noon), wantErr: protocol.ErrNotReady},
	})
}

func TestZeroTransitionIsIllegal(t *testing.T) {
	run(t, map[string]step{
		"on a lease with a status":    {lease: held("a", 7), wantErr: protocol.ErrIllegal},
		"on a lease without a status": {lease: fresh(), wantErr: protocol.ErrNotReady},
	})
	if _, _, err := protocol.Patch(held("a", 7).FencedLease, protocol.Transition{}); !errors.Is(err, protocol.ErrIllegal) {
		t.Errorf("Patch: got %v, want %v", err, protocol.ErrIllegal)
	}
}

func TestTransitionsNameThemselves(t *testing.T) {
	for want, transition := range map[string]protocol.Transition{
		`Initialise`:             protocol.Initialise(noon),
		`Acquire by "a"`:         protocol.Acquire(contender("a", 7), noon),
		`Grant by "a"`:           protocol.Grant(contender("a", 7), nil, 0, noon),
		`Release by "a"`:         protocol.Release(contender("a", 7), noon),
		`End of 101: Expired`:    protocol.End(101, v1alpha1.EndExpired, noon),
		`Queue of 1, 30 waiting`: protocol.Queue([]v1alpha1.Contender{contender("a", 7)}, 30),
		`EndCooldown`:            protocol.EndCooldown(noon),
		`Observe`:                protocol.Observe(noon),
	} {
		if got := transition.String(); got != want {
			t.Errorf("got %s, want %s", got, want)
		}
		if kind := string(transition.Kind()); !strings.HasPrefix(want, kind) {
			t.Errorf("%s is of kind %s", want, kind)
		}
	}
	if got := protocol.Release(contender("a", 7), noon).Reason(); got != v1alpha1.EndReleased {
		t.Errorf("a release ends a term as %q", got)
	}
}
