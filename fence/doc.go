// SPDX-License-Identifier: Apache-2.0

// Package fence holds leases with fencing tokens. A process keeps one Session alive and acquires any number of
// FencedLeases with it. Each grant of a lease has the next Token, and NewClient presents it with every write, so that
// the API server refuses the write of a holder who was paused, cut off or slow, and has been replaced.
//
//	s, err := fence.NewSession(ctx, cfg, fence.Options{Namespace: "shop"})
//	...
//	defer s.Close(ctx)
//	err = s.Do(ctx, "orders", func(ctx context.Context, token fence.Token) error {
//		...
//	})
//
// # What it promises
//
// When a term ends by expiry, its context has ended before the lease can be somebody else's, as long as this process
// and its clock run, whatever the wall clocks say. The session counts from when it sent the last renewal that
// succeeded, on its own clock (on Linux one that goes on while the machine sleeps), and gives up a margin earlier: a
// tenth of the TTL, at least 250 milliseconds. Everybody else counts from when he saw that renewal, which is later.
//
// When a term is taken away (stolen, its longest time over, its lease deleted), the context ends as soon as the watch
// says so; should the watch be dead, within the TTL.
//
// A process that was paused finds itself lost when it wakes: Token, Err and the contexts ask the clock first.
//
// A lost answer is never taken for a failure. An acquire without answer is settled when the lease has gone on, and
// returns the token that it got, which is issued once. A term that no caller wants, from a late answer or a cancelled
// wait, is given back at once.
//
// One heartbeat and one watch per session, however many leases; no goroutine is left when Close returns. The heartbeat
// has connections of its own and no rate limit, so nothing that the program does delays it.
//
// Acquire, release and the handover to whoever stands in the lease's queue need no operator: they are writes which the
// API server checks by itself.
//
// # What it does not promise
//
// The context of a term cannot stop work that does not look at it, nor a write that is on its way. That is what the
// token is for: let every write of the work carry it (NewClient), and protect the objects. Without that this package
// is a lock as all others are, and two may work at a time.
//
// It cannot tell whether the process that asks the clock is stopped between the question and what it does next.
//
// The token fences objects that are protected, nothing else: not those which do not exist yet, not deletions (DELETE
// carries no token in this release), and no other systems, unless they check it themselves.
//
// A write that the guard has judged may be stored after the next grant, until the new holder has written to that object
// himself. So whoever begins a term should first write to the objects that matter, or read them after it wrote.
//
// Leases are not reentrant: callers of one process take turns. There is no order among those who find the lease free,
// and none that survives the loss of a session.
//
// While no controller runs nobody is expired, nobody new gets into a queue, and new leases are not initialised; free
// leases can be had all the same, by whoever looks first.
//
// A session that is lost stays lost. The package prints nothing; it logs at V(1) to the logr.Logger in the context of
// NewSession, if there is one.
package fence
