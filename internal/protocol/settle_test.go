// SPDX-License-Identifier: Apache-2.0

package protocol_test

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/internal/protocol"
)

// seen is a scene with the lease, the live sessions of those who hold, and of those who ask (with ticket 1).
func seen(lease builder, ask ...string) *scene {
	s := &scene{lease: lease, view: protocol.View{Now: noon, Sessions: map[types.UID]protocol.Session{}, Served: map[types.UID]int64{}}}
	if lease.Status != nil && lease.Status.Holder != nil {
		s.view.Sessions[lease.Status.Holder.SessionUID] = session(lease.Status.Holder.Identity)
	}
	for _, name := range ask {
		s.asks(name, 1)
	}
	return s
}

func (s *scene) but(f func(*scene)) *scene { f(s); return s }

// longAgo lets the queue be written again.
func (s *scene) longAgo() *scene { s.view.QueuedFor = time.Hour; return s }

func TestSettle(t *testing.T) {
	a, b, c := contender("a", 1), contender("b", 1), contender("c", 1)
	end := func(reason v1alpha1.EndReason) protocol.Transition { return protocol.End(101, reason, noon) }
	holder := func(f func(*protocol.Session)) *scene {
		return seen(held("a", 1)).but(func(s *scene) { s.change("a", f) })
	}
	for name, tc := range map[string]struct {
		scene *scene
		want  protocol.Transition // zero: nothing to do
		wake  time.Duration
	}{
		"a new lease is started":                             {scene: seen(fresh()), want: protocol.Initialise(noon)},
		"an idle lease has nothing to do":                    {scene: seen(available())},
		"a held one neither":                                 {scene: seen(held("a", 1))},
		"who asks for a free lease gets it":                  {scene: seen(available(), "b"), want: protocol.Grant(b, nil, 0, noon)},
		"the first of many, the rest queue":                  {scene: seen(available(), "b", "c", "a"), want: protocol.Grant(b, []v1alpha1.Contender{c, a}, 2, noon)},
		"who asks for a held lease queues":                   {scene: seen(held("a", 1), "b"), want: protocol.Queue([]v1alpha1.Contender{b}, 1)},
		"and while it cools down":                            {scene: seen(cooling(), "b"), want: protocol.Queue([]v1alpha1.Contender{b}, 1)},
		"eight queue, the others are counted":                {scene: seen(held("a", 1), "c0", "c1", "c2", "c3", "c4", "c5", "c6", "c7", "c8", "b"), want: protocol.Queue(crowd(8), 10)},
		"who queues has nothing to do":                       {scene: seen(held("a", 1).queue(b), "b")},
		"a dead head goes at once":                           {scene: seen(held("a", 1).queue(b, c), "c"), want: protocol.Queue([]v1alpha1.Contender{c}, 1)},
		"so does one who gave up":                            {scene: seen(held("a", 1).queue(b, c), "c", "b").but(func(s *scene) { s.change("b", func(b *protocol.Session) { b.Wants = nil }) }), want: protocol.Queue([]v1alpha1.Contender{c}, 1)},
		"and one who asks with a new ticket loses the place": {scene: seen(held("a", 1).queue(b, c), "c").but(func(s *scene) { s.asks("b", 2) }), want: protocol.Queue([]v1alpha1.Contender{c, contender("b", 2)}, 2)},
		"the queue's order beats the order seen":             {scene: seen(held("a", 1).queue(b), "c", "b"), want: protocol.Queue([]v1alpha1.Contender{b, c}, 2)},
		"who was served does not get it twice":               {scene: seen(available(), "b").but(func(s *scene) { s.view.Served["uid-b"] = 1 })},
		"after a failover the terms know it":                 {scene: seen(available().token(101).with(func(l builder) { l.Status.Terms = []v1alpha1.Term{term(101, b, v1alpha1.EndReleased)} }), "b")},
		"but a term that somebody claimed with its session does not count": {
			scene: seen(available().token(101).with(func(l builder) {
				forged := term(101, contender("b", v1alpha1.MaxToken), v1alpha1.EndInvalid)
				forged.User, forged.PodUID = "sa-m", "pod-m"
				l.Status.Terms = []v1alpha1.Term{forged}
			}), "b"),
			want: protocol.Grant(b, nil, 0, noon)},
		"and the holder":                                         {scene: seen(held("a", 1), "a")},
		"a later ticket is a new request":                        {scene: seen(held("a", 1)).but(func(s *scene) { s.asks("a", 2) }), want: protocol.Queue([]v1alpha1.Contender{contender("a", 2)}, 1)},
		"a place without a session is nobody's":                  {scene: seen(available()).but(func(s *scene) { s.view.Order = []protocol.Place{{SessionUID: "uid-z", Ticket: 1}} })},
		"a place that was given up is nobody's":                  {scene: seen(available(), "b").but(func(s *scene) { s.change("b", func(b *protocol.Session) { b.Wants = map[string]int64{"orders": 2} }) })},
		"a want for another lease is not ours":                   {scene: seen(available(), "b").but(func(s *scene) { s.change("b", func(b *protocol.Session) { b.Wants = map[string]int64{"billing": 1} }) })},
		"a dying session gets nothing":                           {scene: seen(available(), "b").but(func(s *scene) { s.change("b", func(b *protocol.Session) { b.Dying = true }) })},
		"nor does one that may be silent for too long":           {scene: seen(available(), "b").but(func(s *scene) { s.change("b", func(b *protocol.Session) { b.TTL = 16 * time.Second }) })},
		"nor one that the schema would refuse":                   {scene: seen(available(), "b").but(func(s *scene) { s.change("b", func(b *protocol.Session) { b.Identity = "" }) })},
		"a short queue is filled at once":                        {scene: seen(held("a", 1).queue(crowd(4)...), "c0", "c1", "c2", "c3", "c4"), want: protocol.Queue(crowd(5), 5)},
		"a long one a second later":                              {scene: seen(held("a", 1).queue(crowd(5)...), "c0", "c1", "c2", "c3", "c4", "c5"), wake: time.Second},
		"then it is":                                             {scene: seen(held("a", 1).queue(crowd(5)...), "c0", "c1", "c2", "c3", "c4", "c5").longAgo(), want: protocol.Queue(crowd(6), 6)},
		"the count alone waits a second too":                     {scene: seen(held("a", 1).queue(b).waiting(5), "b").but(func(s *scene) { s.view.QueuedFor = 400 * time.Millisecond }), wake: 600 * time.Millisecond},
		"then it is corrected":                                   {scene: seen(held("a", 1).queue(b).waiting(5), "b").longAgo(), want: protocol.Queue([]v1alpha1.Contender{b}, 1)},
		"also when everybody left an available lease":            {scene: seen(available().waiting(5)).longAgo(), want: protocol.Queue(nil, 0)},
		"the holder's session is gone":                           {scene: seen(held("a", 1)).but(func(s *scene) { delete(s.view.Sessions, "uid-a") }), want: end(v1alpha1.EndSessionClosed)},
		"we expired it":                                          {scene: seen(held("a", 1)).but(func(s *scene) { delete(s.view.Sessions, "uid-a"); s.view.Expired = true }), want: end(v1alpha1.EndExpired)},
		"it was never there":                                     {scene: seen(held("a", 1)).but(func(s *scene) { delete(s.view.Sessions, "uid-a"); s.view.Begun = true }), want: end(v1alpha1.EndInvalid)},
		"it is being deleted":                                    {scene: holder(func(s *protocol.Session) { s.Dying = true }), want: end(v1alpha1.EndSessionClosed)},
		"it is another user's":                                   {scene: holder(func(s *protocol.Session) { s.User = "sa-other" }), want: end(v1alpha1.EndInvalid)},
		"it is another Pod's":                                    {scene: holder(func(s *protocol.Session) { s.PodUID = "" }), want: end(v1alpha1.EndInvalid)},
		"it has another name":                                    {scene: holder(func(s *protocol.Session) { s.Contender.Session = "other" }), want: end(v1alpha1.EndInvalid)},
		"it has another identity":                                {scene: holder(func(s *protocol.Session) { s.Identity = "other" }), want: end(v1alpha1.EndInvalid)},
		"it is too slow, and took the lease just now":            {scene: holder(func(s *protocol.Session) { s.TTL = 16 * time.Second }).but(func(s *scene) { s.view.Begun = true }), want: end(v1alpha1.EndInvalid)},
		"a running term keeps its own":                           {scene: holder(func(s *protocol.Session) { s.TTL = 16 * time.Second })},
		"a holder who is no longer silent keeps it":              {scene: seen(held("a", 1)).but(func(s *scene) { s.view.Expired = true })},
		"the term is too long":                                   {scene: seen(held("a", 1).maxHold(60)).but(func(s *scene) { s.view.HeldFor = time.Minute }), want: end(v1alpha1.EndMaxHold)},
		"not yet":                                                {scene: seen(held("a", 1).maxHold(60)).but(func(s *scene) { s.view.HeldFor = 59 * time.Second }), wake: time.Second},
		"a term that ends waits for the dead head to go":         {scene: seen(held("a", 1).queue(b, c), "c").but(func(s *scene) { delete(s.view.Sessions, "uid-a") }), want: protocol.Queue([]v1alpha1.Contender{c}, 1)},
		"the cooldown is over":                                   {scene: seen(cooling()).but(func(s *scene) { s.view.CooledFor = 5 * time.Second }), want: protocol.EndCooldown(noon)},
		"so it is when the spec asks for none any more":          {scene: seen(cooling().cooldown(0)), want: protocol.EndCooldown(noon)},
		"it is not over":                                         {scene: seen(cooling()).but(func(s *scene) { s.view.CooledFor = 4 * time.Second }), wake: time.Second},
		"it waits for the dead head to go":                       {scene: seen(cooling().queue(b, c), "c").but(func(s *scene) { s.view.CooledFor = 5 * time.Second }), want: protocol.Queue([]v1alpha1.Contender{c}, 1)},
		"the sooner of two waits":                                {scene: seen(held("a", 1).maxHold(60).queue(b).waiting(2), "b").but(func(s *scene) { s.view.HeldFor = 59900 * time.Millisecond }), wake: 100 * time.Millisecond},
		"or the other":                                           {scene: seen(held("a", 1).maxHold(60).queue(b).waiting(2), "b"), wake: time.Second},
		"without tokens nobody queues":                           {scene: seen(held("a", 1).token(v1alpha1.MaxToken).queue(b), "b"), want: protocol.Queue(nil, 0)},
		"nor is granted":                                         {scene: seen(available().token(v1alpha1.MaxToken), "b"), want: protocol.Observe(noon)},
		"a lease that is being deleted is granted to nobody":     {scene: seen(available().dying(), "a")},
		"who queues for a lease that is being deleted is let go": {scene: seen(held("a", 1).dying().queue(b), "b"), want: protocol.Queue(nil, 0)},
		"the spec changed":                                       {scene: seen(held("a", 1).with(func(b builder) { b.Generation = 2 })), want: protocol.Observe(noon)},
		"the condition is missing":                               {scene: seen(held("a", 1).with(func(b builder) { b.Status.Conditions = nil })), want: protocol.Observe(noon)},
		"the queue comes before the condition":                   {scene: seen(held("a", 1).with(func(b builder) { b.Generation = 2 }), "b"), want: protocol.Queue([]v1alpha1.Contender{b}, 1)},
	} {
		t.Run(name, func(t *testing.T) {
			before := tc.scene.lease.DeepCopy()
			got, wake, ok := protocol.Settle(tc.scene.lease.FencedLease, tc.scene.view)
			if diff := cmp.Diff(before, tc.scene.lease.FencedLease); diff != "" {
				t.Errorf("Settle changed the lease (-before +after):\n%s", diff)
			}
			if ok != (tc.want.Kind() != "") || wake != tc.wake {
				t.Errorf("got %v and wake after %v, want %v after %v", ok, wake, tc.want.Kind() != "", tc.wake)
			}
			if diff := cmp.Diff(tc.want, got, cmp.AllowUnexported(protocol.Transition{}), nilIsEmpty); diff != "" {
				t.Errorf("transition (-want +got):\n%s", diff)
			}
		})
	}
}

// nilIsEmpty: an absent queue and an empty one are the same transition.
var nilIsEmpty = cmp.Transformer("nilIsEmpty", func(in []v1alpha1.Contender) string {
	text := ""
	for _, c := range in {
		text += line(&v1alpha1.FencedLease{Status: &v1alpha1.FencedLeaseStatus{Holder: &v1alpha1.Holder{Contender: c}}})
	}
	return text
})
