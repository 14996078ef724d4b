// SPDX-License-Identifier: Apache-2.0

package protocol_test

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/internal/protocol"
)

// TestInteraction plays the stories in testdata, which docs/protocol.md quotes. If one changed on purpose,
// run `go test ./internal/protocol -run TestInteraction -rewrite`, and read the difference.
func TestInteraction(t *testing.T) {
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		p := &play{now: noon, sessions: map[string]*protocol.Session{}, late: map[string][]byte{}, objects: map[string]*metav1.PartialObjectMetadata{}}
		p.forget()
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			p.t = t
			return p.do(d)
		})
	})
}

// play is a stage: a lease, sessions, protected objects, one controller and its memory.
type play struct {
	t        *testing.T
	now      time.Time
	lease    *v1alpha1.FencedLease // nil: deleted
	sessions map[string]*protocol.Session
	lives    int
	late     map[string][]byte // patches under way
	objects  map[string]*metav1.PartialObjectMetadata

	// The controller's memory.
	order                     []protocol.Place
	served                    map[types.UID]int64
	expired                   map[types.UID]bool
	token                     int64
	phase                     v1alpha1.Phase
	begun                     bool
	termSince, queueWrittenAt time.Time
}

func (p *play) do(d *datadriven.TestData) string {
	what := ""
	if len(d.CmdArgs) > 0 {
		what = d.CmdArgs[0].Key
	}
	switch d.Cmd {
	case "lease":
		return p.create(d)
	case "delete":
		p.lease = nil
		return "the lease is gone"
	case "show":
		return p.show()
	case "session":
		s := session(what)
		s.TTL = time.Duration(number(d, "ttl", 15)) * time.Second
		p.lives++ // a process that comes back has another session
		s.Contender.Session, s.SessionUID = fmt.Sprintf("%s-%d", what, p.lives), types.UID(fmt.Sprintf("uid-%d", p.lives))
		p.sessions[what] = &s
		return fmt.Sprintf("session %s, TTL %s", what, s.TTL)
	case "ask":
		return p.ask(p.sessions[what])
	case "give-up":
		p.sessions[what].Wants = map[string]int64{}
		return what + " waits no more"
	case "pass":
		by, err := time.ParseDuration(what)
		if err != nil {
			p.t.Fatal(err)
		}
		p.now = p.now.Add(by)
		return p.now.Format("15:04:05")
	case "acquire":
		s := p.sessions[what]
		s.Ticket++
		return p.write(protocol.Acquire(s.Request(s.Ticket), p.now), text(d, "late"))
	case "release":
		s := p.sessions[what]
		return p.write(protocol.Release(s.Request(number(d, "ticket", s.Ticket)), p.now), text(d, "late"))
	case "steal":
		return p.write(protocol.End(p.lease.Status.Token, v1alpha1.EndStolen, p.now), text(d, "late"))
	case "land":
		return p.land(what)
	case "silent", "gone": // the controller deletes a silent session; a gone one was deleted by somebody else
		p.expired[p.sessions[what].SessionUID] = d.Cmd == "silent"
		delete(p.sessions, what)
		return "session " + what + " is deleted"
	case "failover":
		p.forget()
		return "another controller leads, and remembers nothing"
	case "settle":
		return p.settle()
	case "protect":
		return p.judge(what, notes(leaseKey, "orders"), protocol.Requester{User: "admin"})
	case "write":
		return p.writeObject(d, what)
	}
	p.t.Fatalf("unknown command %s", d.Cmd)
	return ""
}

func text(d *datadriven.TestData, key string) string {
	for _, arg := range d.CmdArgs {
		if arg.Key == key {
			return strings.Join(arg.Vals, " ")
		}
	}
	return ""
}

func number(d *datadriven.TestData, key string, otherwise int64) int64 {
	value := text(d, key)
	if value == "" {
		return otherwise
	}
	n, err := strconv.ParseInt(value, 10, 64)
	if err != nil {
		panic(err)
	}
	return n
}

func (p *play) create(d *datadriven.TestData) string {
	l := fresh().cooldown(int32(number(d, "cooldown", 0))).minToken(number(d, "min-token", 0))
	if hold := number(d, "max-hold", 0); hold > 0 {
		l.maxHold(int32(hold))
	}
	l.ResourceVersion = fmt.Sprint(number(d, "resourceVersion", 100))
	p.lease = l.FencedLease
	return line(p.lease)
}

func (p *play) show() string {
	out := line(p.lease)
	for _, t := range p.lease.Status.Terms {
		out += fmt.Sprintf("\nterm %d: %s/%d, %s to %s, %s", t.Token, t.Identity, t.Ticket, t.StartTime.Format("15:04:05"), t.EndTime.Format("15:04:05"), t.EndReason)
	}
	return out
}

func (p *play) ask(s *protocol.Session) string {
	s.Ticket++
	s.Wants = map[string]int64{"orders": s.Ticket}
	p.order = append(p.order, protocol.Place{SessionUID: s.SessionUID, Ticket: s.Ticket})
	return "waits with " + protocol.FormatWants(s.Wants)
}

// write writes a transition; a late one is decided now, and lands when the story says so.
func (p *play) write(move protocol.Transition, late string) string {
	patch, next, err := protocol.Patch(p.lease, move)
	if err != nil {
		return err.Error()
	}
	if late != "" {
		p.late[late] = patch
		return fmt.Sprintf("%s: sent on %q, no answer", move, line(p.lease))
	}
	p.lease = next
	return line(p.lease)
}

func (p *play) land(name string) string {
	doc, err := apply(p.t, encode(p.t, p.lease), p.late[name])
	if err != nil {
		return "refused, the lease has changed: " + line(p.lease)
	}
	p.lease = decode(p.t, doc)
	return line(p.lease)
}

// forget is a failover. What the new controller sees of the wants it puts in order by ticket.
func (p *play) forget() {
	p.order, p.served, p.expired, p.token, p.begun = nil, map[types.UID]int64{}, map[types.UID]bool{}, 0, false
	for _, s := range p.sessions {
		if ticket := s.Wants["orders"]; ticket > 0 {
			p.order = append(p.order, protocol.Place{SessionUID: s.SessionUID, Ticket: ticket})
		}
	}
	slices.SortFunc(p.order, func(a, b protocol.Place) int { return int(a.Ticket - b.Ticket) })
	p.termSince, p.queueWrittenAt = p.now, p.now
}

func (p *play) settle() string {
	var out []string
	for range 10 {
		move, wake, ok := protocol.Settle(p.lease, p.view())
		if !ok {
			if len(out) == 0 {
				out = append(out, "nothing to do")
			}
			if wake > 0 {
				out = append(out, "looks again after "+wake.String())
			}
			return strings.Join(out, "\n")
		}
		if move.Kind() == protocol.KindQueue || move.Kind() == protocol.KindGrant {
			p.queueWrittenAt = p.now
		}
		out = append(out, fmt.Sprintf("%s -> %s", move, p.write(move, "")))
	}
	p.t.Fatal("the controller does not come to rest")
	return ""
}

// view is what the controller knows now.
func (p *play) view() protocol.View {
	v := protocol.View{Now: p.now, Sessions: map[types.UID]protocol.Session{}, Order: p.order, Served: p.served, QueuedFor: p.now.Sub(p.queueWrittenAt)}
	for _, s := range p.sessions {
		v.Sessions[s.SessionUID] = *s
	}
	if p.lease.Status == nil {
		return v
	}
	s := p.lease.Status
	if s.Token != p.token || s.Phase != p.phase {
		p.begun = p.token != 0 && s.Token != p.token
		p.token, p.phase, p.termSince = s.Token, s.Phase, p.now
	}
	if s.Holder != nil {
		p.served[s.Holder.SessionUID] = max(p.served[s.Holder.SessionUID], s.Holder.Ticket)
		v.Expired = p.expired[s.Holder.SessionUID]
	}
	v.HeldFor, v.CooledFor, v.Begun = p.now.Sub(p.termSince), p.now.Sub(p.termSince), p.begun
	p.begun = false // from now on its session was judged
	return v
}

// writeObject is a write to a protected object: by=a token=101 bypass=fire.
func (p *play) writeObject(d *datadriven.TestData, name string) string {
	request := p.objects[name].DeepCopy()
	by := protocol.Requester{User: "sa-" + text(d, "by"), PodUID: types.UID("pod-" + text(d, "by"))}
	for key, annotation := range map[string]string{"token": tokenKey, "bypass": bypassKey} {
		if value := text(d, key); value != "" {
			request.Annotations[annotation] = value
		}
	}
	return p.judge(name, request, by)
}

// judge asks for a verdict, and stores what passes. Only admin has verbs.
func (p *play) judge(name string, request *metav1.PartialObjectMetadata, by protocol.Requester) string {
	w := &world{leases: map[string]builder{}, verbs: map[string]bool{"protect shop/orders": by.User == "admin", "bypass shop/orders": by.User == "sa-admin"}}
	if p.lease != nil {
		w.leases["shop/orders"] = builder{p.lease}
	}
	got, err := protocol.Verdict(protocol.Write{
		Namespace: "shop", Old: p.objects[name], New: request, By: by,
		Changes: func() (protocol.Changes, error) { return protocol.Changes{Other: true}, nil },
	}, w)
	if err != nil {
		p.t.Fatal(err)
	}
	if !got.Allowed() {
		return fmt.Sprintf("%s %s: %s", got.Result, got.Reason, got.Message)
	}
	stored := notes(leaseKey, "orders")
	if got.Mark != "" {
		stored.Annotations[markKey] = got.Mark
	}
	p.objects[name] = stored
	return strings.Join(append([]string{fmt.Sprintf("%s, mark %q", got.Result, got.Mark)}, got.Warnings...), "\n")
}
