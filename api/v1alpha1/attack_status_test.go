// SPDX-License-Identifier: Apache-2.0

package v1alpha1_test

import (
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/internal/protocol"
)

// untouched is a step that leads nowhere: to the lease as it is.
func untouched(l *v1alpha1.FencedLease) protocol.Transition {
	return protocol.Queue(l.Status.Queue, l.Status.Waiting)
}

// authorityRows would be right if somebody else did them.
func authorityRows(c *cluster) map[string]statusRow {
	status := policy("status")
	rows := map[string]statusRow{
		"a namespace admin initialises":                      {none: true, by: c.nora, write: legit(initialise), want: status},
		"a contender initialises":                            {none: true, by: c.rival, write: legit(initialise), want: status},
		"the controller starts above the resourceVersion":    {none: true, by: c.controller, write: full(initialise, set(int64(1<<40), "token")), want: status},
		"the controller starts below the resourceVersion":    {none: true, by: c.controller, write: full(initialise, set(int64(1), "token")), want: status},
		"a contender acquires as another user":               {by: c.rival, write: legit(acquire(c.holder)), want: status},
		"a Pod acquires as another Pod of its account":       {by: c.otherPod, write: legit(acquire(c.holder)), want: status},
		"an account outside Pods acquires as a Pod":          {by: c.outsidePods, write: legit(acquire(c.holder)), want: status},
		"a Pod acquires as if outside Pods":                  {by: c.holder, write: full(acquire(c.holder), set(nil, "holder", "podUID")), want: status},
		"a namespace admin acquires as a Pod":                {by: c.nora, write: legit(acquire(c.holder)), want: status},
		"a contender acquires and counts the waiters anew":   {by: c.rival, write: full(acquire(c.rival), set(int64(3), "waiting")), want: status},
		"a contender acquires and lines up others":           {by: c.rival, write: legit(always(protocol.Grant(c.rival.contender, []v1alpha1.Contender{c.alice.contender}, 1, epoch))), want: status},
		"a contender acquires and drops the conditions":      {by: c.rival, write: full(acquire(c.rival), set(nil, "conditions")), want: status},
		"a contender acquires and observes":                  {by: c.rival, write: full(acquire(c.rival), set(int64(9), "observedGeneration")), want: status},
		"another Pod of the account releases":                {given: c.held(), by: c.otherPod, write: legit(release(c.holder)), want: status},
		"the account outside Pods releases":                  {given: c.held(), by: c.outsidePods, write: legit(release(c.holder)), want: status},
		"a contender releases the holder's term":             {given: c.held(), by: c.rival, write: legit(release(c.holder)), want: status},
		"the next in line releases the holder's term":        {given: c.queued(), by: c.rival, write: legit(release(c.holder)), want: status},
		"a namespace admin releases the holder's term":       {given: c.held(), by: c.nora, write: legit(release(c.holder)), want: status},
		"a namespace admin queues":                           {given: c.held(), by: c.nora, write: legit(always(protocol.Queue([]v1alpha1.Contender{c.rival.contender}, 1))), want: status},
		"a namespace admin reports":                          {given: c.held(), by: c.nora, write: full(untouched, set("False", "conditions", "status")), want: status},
		"a namespace admin steals and reports":               {given: c.held(), by: c.nora, write: full(end(v1alpha1.EndStolen), set(nil, "conditions")), want: status},
		"the next in line steals without the verb":           {given: c.queued(), by: c.rival, write: full(end(v1alpha1.EndStolen)), want: status},
		"the holder steals from himself without the verb":    {given: c.held(), by: c.holder, write: full(end(v1alpha1.EndStolen)), want: status},
		"a contender enters the queue himself":               {given: c.held(), by: c.rival, write: legit(always(protocol.Queue([]v1alpha1.Contender{c.rival.contender}, 1))), want: status},
		"the next in line pushes himself to the front":       {given: c.queued(), by: c.alice, write: legit(always(protocol.Queue([]v1alpha1.Contender{c.alice.contender, c.rival.contender}, 5))), want: status},
		"the holder empties the queue":                       {given: c.queued(), by: c.holder, write: legit(always(protocol.Queue(nil, 0))), want: status},
		"the holder edits waiting":                           {given: c.queued(), by: c.holder, write: full(untouched, set(int64(9), "waiting")), want: status},
		"a contender edits waiting of an available lease":    {by: c.rival, write: full(untouched, set(int64(7), "waiting")), want: status},
		"a stranger changes nothing":                         {given: c.held(), by: c.rival, write: full(untouched), want: status},
		"the holder changes nothing":                         {given: c.held(), by: c.holder, write: full(untouched), want: status},
		"the holder releases and drops the conditions":       {given: c.held(), by: c.holder, write: full(release(c.holder), set(nil, "conditions")), want: status},
		"the holder releases and observes":                   {given: c.held(), by: c.holder, write: full(release(c.holder), set(int64(9), "observedGeneration")), want: status},
		"a contender ends the cooldown":                      {spec: spec{cooldown: 30}, given: c.cooling(), by: c.rival, write: legit(always(protocol.EndCooldown(epoch))), want: status},
		"a namespace admin ends the cooldown":                {spec: spec{cooldown: 30}, given: c.cooling(), by: c.nora, write: legit(always(protocol.EndCooldown(epoch))), want: status},
		"whoever held it before the cooldown begins ends it": {spec: spec{cooldown: 30}, given: c.cooling(), by: c.holder, write: legit(always(protocol.EndCooldown(epoch))), want: status},
	}
	for _, reason := range endReasons {
		if reason != v1alpha1.EndReleased {
			rows["the holder ends his term as "+string(reason)] = statusRow{given: c.held(), by: c.holder, write: full(end(reason)), want: status}
		}
		if reason != v1alpha1.EndReleased && reason != v1alpha1.EndStolen {
			rows["an admin with the verb steal ends a term as "+string(reason)] = statusRow{given: c.held(), by: c.lena, write: full(end(reason)), want: status}
		}
	}
	return rows
}

// freeAgain undoes an acquire of a lease without history.
func freeAgain(s map[string]any) {
	s["phase"], s["token"], s["handovers"] = "Available", s["token"].(int64)-1, int64(0)
	delete(s, "holder")
}

// structureRows are refused to everybody, even to the controller.
func structureRows(c *cluster) map[string]statusRow {
	token := rule("takes the next token")
	history := rule("status.terms grows by the term that ended")
	removed := rule("status cannot be removed")
	return map[string]statusRow{
		"the holder removes the status by JSON patch":  {given: c.held(), by: c.holder, write: raw(types.JSONPatchType, `[{"op":"remove","path":"/status"}]`), want: removed},
		"the holder removes the status by merge patch": {given: c.held(), by: c.holder, write: raw(types.MergePatchType, `{"status":null}`), want: removed},
		"the first status is Held": {none: true, by: c.controller, write: full(initialise, func(s map[string]any) {
			s["phase"], s["holder"] = "Held", encodeContender(c.rival.contender, "2026-01-02T03:04:05.000000Z")
		}), want: rule("the first status is Available")},
		"a contender skips a token":                    {by: c.rival, write: full(acquire(c.rival), plus(1, "token")), want: token},
		"a contender repeats the token":                {by: c.rival, write: full(acquire(c.rival), plus(-1, "token")), want: token},
		"a contender takes a smaller token":            {by: c.rival, write: full(acquire(c.rival), plus(-2, "token")), want: token},
		"a contender takes a token below minToken":     {spec: spec{minToken: 1 << 40}, by: c.rival, write: full(acquire(c.rival), set(int64(1<<39), "token")), want: token},
		"the controller lets the token fall":           {by: c.controller, write: full(acquire(c.rival), plus(-2, "token")), want: token},
		"the controller raises the token alone":        {given: c.held(), by: c.controller, write: full(untouched, plus(1, "token")), want: token},
		"a contender counts no handover":               {by: c.rival, write: full(acquire(c.rival), plus(-1, "handovers")), want: token},
		"the holder rewrites his identity":             {given: c.held(), by: c.holder, write: full(untouched, set("someone-else", "holder", "identity")), want: token},
		"the holder rewrites his session":              {given: c.held(), by: c.holder, write: full(untouched, set("other", "holder", "sessionUID")), want: token},
		"the holder rewrites his acquireTime":          {given: c.held(), by: c.holder, write: full(untouched, set("2030-01-01T00:00:00.000000Z", "holder", "acquireTime")), want: token},
		"a contender takes over in place":              {given: c.held(), by: c.rival, write: full(untouched, set(encodeContender(c.rival.contender, "2026-01-02T03:04:05.000000Z"), "holder")), want: token},
		"the token is 2^53":                            {by: c.rival, write: full(acquire(c.rival), set(int64(1<<53), "token")), want: rule("status.token")},
		"the history is rewritten":                     {given: c.longHistory(), by: c.holder, write: full(release(c.holder), term(3, "identity", "nobody")), want: history},
		"the newest old term is rewritten":             {given: c.longHistory(), by: c.holder, write: full(release(c.holder), term(1, "endReason", "Stolen")), want: history},
		"the history is cut":                           {given: c.longHistory(), by: c.holder, write: full(release(c.holder), cut(5)), want: history},
		"the history loses one term":                   {given: c.longHistory(), by: c.holder, write: full(release(c.holder), cut(9)), want: history},
		"the history has eleven terms":                 {given: c.longHistory(), by: c.holder, write: full(release(c.holder), repeatTerm), want: rule("status.terms")},
		"the history is emptied without an end":        {given: c.longHistory(), by: c.controller, write: full(untouched, set([]any{}, "terms")), want: history},
		"an acquire writes history":                    {given: []step{acquire(c.alice), release(c.alice)}, by: c.rival, write: full(acquire(c.rival), repeatTerm), want: history},
		"a release does not record the term":           {given: c.held(), by: c.holder, write: full(release(c.holder), set([]any{}, "terms")), want: history},
		"a release records another token":              {given: c.held(), by: c.holder, write: full(release(c.holder), term(0, "token", int64(1))), want: history},
		"a release records another identity":           {given: c.held(), by: c.holder, write: full(release(c.holder), term(0, "identity", "nobody")), want: history},
		"a release records another session":            {given: c.held(), by: c.holder, write: full(release(c.holder), term(0, "sessionUID", "other")), want: history},
		"a release records another ticket":             {given: c.held(), by: c.holder, write: full(release(c.holder), term(0, "ticket", int64(8))), want: history},
		"a release records another beginning":          {given: c.held(), by: c.holder, write: full(release(c.holder), term(0, "startTime", "2001-01-01T00:00:00.000000Z")), want: history},
		"a term ends for a reason that does not exist": {given: c.held(), by: c.holder, write: full(release(c.holder), term(0, "endReason", "Bored")), want: rule("status.terms[0].endReason")},
		"a steal skips the cooldown": {spec: spec{cooldown: 30}, given: c.held(), by: c.lena, write: full(end(v1alpha1.EndStolen), func(s map[string]any) {
			s["phase"] = "Available"
			delete(s, "cooldownUntil")
		}), want: rule("followed by the cooldown")},
		"a release is called a steal to begin a cooldown": {spec: spec{cooldown: 30}, given: c.held(), by: c.holder, write: full(end(v1alpha1.EndStolen), term(0, "endReason", "Released")), want: rule("followed by the cooldown")},
		"a contender acquires in the cooldown": {spec: spec{cooldown: 30}, given: []step{acquire(c.holder), end(v1alpha1.EndExpired)}, by: c.rival,
			write: full(always(protocol.EndCooldown(epoch)), grantTo(c.rival)), want: rule("only the head of the queue follows")},
		"the cooldown is prolonged":              {spec: spec{cooldown: 30}, given: c.cooling(), by: c.controller, write: full(untouched, set("2031-01-01T00:00:00.000000Z", "cooldownUntil")), want: rule("a cooldown follows a term")},
		"a cooldown comes from nowhere":          {by: c.controller, write: full(untouched, set("Cooldown", "phase"), set("2031-01-01T00:00:00.000000Z", "cooldownUntil")), want: rule("a cooldown follows a term")},
		"Held by nobody":                         {given: c.held(), by: c.holder, write: full(untouched, set(nil, "holder")), want: rule("status.holder is there exactly while Held")},
		"Available with a holder":                {given: c.held(), by: c.holder, write: full(untouched, set("Available", "phase")), want: rule("status.holder is there exactly while Held")},
		"a contender queues for a free lease":    {by: c.rival, write: full(untouched, set([]any{encodeContender(c.rival.contender, "")}, "queue"), set(int64(1), "waiting")), want: rule("nobody queues while the lease is Available")},
		"fewer waiters than the queue":           {given: c.queued(), by: c.controller, write: full(untouched, set(int64(1), "waiting")), want: rule("status.waiting counts at least the queue")},
		"the holder's request in the queue":      {given: c.held(), by: c.controller, write: full(untouched, set([]any{encodeContender(c.holder.contender, "")}, "queue"), set(int64(1), "waiting")), want: rule("stands once in the line")},
		"a request stands twice in the queue":    {given: c.queued(), by: c.controller, write: full(untouched, double), want: rule("stands once in the line")},
		"a queue of nine":                        {given: c.held(), by: c.controller, write: full(untouched, nine), want: rule("status.queue")},
		"the status loses its queue":             {given: c.queued(), by: c.controller, write: full(untouched, set(nil, "queue")), want: rule("status.queue")},
		"a released term leaves a shorter queue": {given: c.queued(), by: c.holder, write: full(release(c.holder), set([]any{}, "queue")), want: rule("the queue loses exactly its head")},
	}
}

// handoffRows are releases that hand over to somebody else than the head of the queue, as it stands there.
func handoffRows(c *cluster) map[string]statusRow {
	head := rule("only the head of the queue follows")
	rows := map[string]statusRow{
		"a holder hands over to nobody": {given: c.queued(), by: c.holder, write: full(release(c.holder), func(s map[string]any) {
			freeAgain(s)
			s["handovers"], s["queue"], s["waiting"] = int64(1), []any{}, int64(0)
		}), want: rule("a term that ends leaves the queue as it is")},
		"a holder hands over to himself":                        {given: c.queued(), by: c.holder, write: full(release(c.holder), set(encodeContender(retry(c.holder), "2026-01-02T03:04:05.000000Z"), "holder")), want: head},
		"a holder skips the head":                               {given: c.queued(), by: c.holder, write: full(release(c.holder), set(encodeContender(c.alice.contender, "2026-01-02T03:04:05.000000Z"), "holder"), set([]any{}, "queue")), want: head},
		"a holder hands over and keeps the head in the queue":   {given: c.queued(), by: c.holder, write: full(release(c.holder), set([]any{encodeContender(retry(c.rival), ""), encodeContender(c.alice.contender, "")}, "queue")), want: head},
		"a holder hands over and does not count the waiters":    {given: c.queued(), by: c.holder, write: full(release(c.holder), plus(1, "waiting")), want: head},
		"a holder hands over with an empty queue to a friend":   {given: c.held(), by: c.holder, write: full(release(c.holder), grantTo(c.otherPod)), want: head},
		"a contender takes a held lease with the next token":    {given: c.held(), by: c.rival, write: full(release(c.holder), grantTo(c.rival)), want: head},
		"the head of the queue takes it, and gives no reason":   {given: c.queued(), by: c.rival, write: full(release(c.holder), term(0, "endReason", nil)), want: rule("status.terms[0].endReason")},
		"the end of the cooldown passes over the head":          {spec: spec{cooldown: 30}, given: c.cooling(), by: c.controller, write: full(always(protocol.EndCooldown(epoch)), set(encodeContender(c.alice.contender, "2026-01-02T03:04:05.000000Z"), "holder")), want: head},
		"the controller grants over the head of a held lease":   {given: c.queued(), by: c.controller, write: full(end(v1alpha1.EndExpired), set(encodeContender(c.alice.contender, "2026-01-02T03:04:05.000000Z"), "holder"), set([]any{}, "queue")), want: head},
		"an admin steals for somebody who is not next":          {given: c.queued(), by: c.lena, write: full(end(v1alpha1.EndStolen), set(encodeContender(c.alice.contender, "2026-01-02T03:04:05.000000Z"), "holder"), set([]any{}, "queue")), want: head},
		"an admin steals for himself although there is a queue": {given: c.queued(), by: c.lena, write: full(end(v1alpha1.EndStolen), set(encodeContender(c.lena.contender, "2026-01-02T03:04:05.000000Z"), "holder")), want: head},
	}
	for leaf, forged := range map[string]any{"identity": "forged", "session": "forged", "sessionUID": "forged", "user": "forged", "podUID": "forged", "ticket": int64(99)} {
		rows["a handoff forges "+leaf] = statusRow{given: c.queued(), by: c.holder, write: full(release(c.holder), set(forged, "holder", leaf)), want: head}
	}
	rows["a handoff drops the Pod"] = statusRow{given: c.queued(), by: c.holder, write: full(release(c.holder), set(nil, "holder", "podUID")), want: head}
	return rows
}

// poisonRows hold what would be stored and could not be read, or not by everybody. One lease that our types cannot
// decode would break every informer.
func poisonRows(c *cluster) map[string]statusRow {
	rows := map[string]statusRow{
		"an identity of 1025 characters": {by: c.rival, write: full(acquire(c.rival), set(strings.Repeat("x", 1025), "holder", "identity")), want: rule("status.holder.identity")},
		"a session of 254 characters":    {by: c.rival, write: full(acquire(c.rival), set(strings.Repeat("x", 254), "holder", "session")), want: rule("status.holder.session")},
		"a session that is no name":      {by: c.rival, write: full(acquire(c.rival), set("x/y", "holder", "session")), want: rule("status.holder.session")},
		"a session with a percent sign":  {by: c.rival, write: full(acquire(c.rival), set("x%2f", "holder", "session")), want: rule("status.holder.session")},
		"a session that is a dot":        {by: c.rival, write: full(acquire(c.rival), set("..", "holder", "session")), want: rule("status.holder.session")},
		"a sessionUID of 37 characters":  {by: c.rival, write: full(acquire(c.rival), set(strings.Repeat("x", 37), "holder", "sessionUID")), want: rule("status.holder.sessionUID")},
		"a user of 513 characters":       {by: c.rival, write: full(acquire(c.rival), set(strings.Repeat("x", 513), "holder", "user")), want: rule("status.holder.user")},
		"an empty podUID":                {by: c.alice, write: full(acquire(c.alice), set("", "holder", "podUID")), want: rule("status.holder.podUID")},
		"half a ticket":                  {by: c.rival, write: full(acquire(c.rival), set(1.5, "holder", "ticket")), want: rule("status.holder.ticket")},
		"a token with a fraction":        {by: c.rival, write: full(acquire(c.rival), set(1.5, "token")), want: rule("status.token")},
		"a ticket of 2^53":               {by: c.rival, write: full(acquire(c.rival), set(int64(1<<53), "holder", "ticket")), want: rule("status.holder.ticket")},
		"a ticket that is text":          {by: c.rival, write: full(acquire(c.rival), set("7", "holder", "ticket")), want: rule("status.holder.ticket")},
	}
	// 7.0 and 7e0 are integers to JSON schema: they are stored, and must be stored as the integer.
	for number, want := range map[string]verdict{"7.0": stored, "7e0": stored, "0.7e1": stored, "7.25": rule("ticket"), "7e300": rule("ticket"), "9007199254740993": rule("ticket"), "-7": rule("ticket")} {
		rows["a ticket written as "+number] = statusRow{by: c.rival, write: written(acquire(c.rival), `"ticket":7`, `"ticket":`+number), want: want}
	}
	for _, when := range []string{
		"2026-01-02T03:04:05Z", "2026-01-02T03:04:05.1Z", "2026-01-02T03:04:05.000000+00:00", "2026-02-30T03:04:05.000000Z",
		"2026-01-02T24:00:00.000000Z", "2026-01-02T03:04:60.000000Z", "2026-13-02T03:04:05.000000Z", "2026-00-00T03:04:05.000000Z",
		"2026-01-02t03:04:05.000000z", "2026-01-02T03:04:05,000000Z", "2026-01-02T03:04:05.000000Z\n", "", "now", "９026-01-02T03:04:05.000000Z",
		"0001-01-01T00:00:00.000000Z", "0000-01-02T03:04:05.000000Z", // read as no time at all
	} {
		rows["an acquireTime of "+when] = statusRow{by: c.rival, write: full(acquire(c.rival), set(when, "holder", "acquireTime")), want: rule("status.holder.acquireTime")}
		rows["an endTime of "+when] = statusRow{given: c.held(), by: c.holder, write: full(release(c.holder), term(0, "endTime", when)), want: rule("status.terms[0].endTime")}
	}
	return rows
}

// written writes the whole status with some of its text replaced.
func written(next step, from, to string) func(*v1alpha1.FencedLease) edit {
	return func(l *v1alpha1.FencedLease) edit {
		w := full(next)(l)
		w.data = []byte(strings.Replace(string(w.data), from, to, 1))
		return w
	}
}

func plus(n int64, key string) edits {
	return func(s map[string]any) { s[key] = s[key].(int64) + n }
}

// term changes a leaf of the i-th term; nil removes it.
func term(i int, leaf string, value any) edits {
	return func(s map[string]any) { set(value, leaf)(s["terms"].([]any)[i].(map[string]any)) }
}

// cut keeps n terms.
func cut(n int) edits {
	return func(s map[string]any) { s["terms"] = s["terms"].([]any)[:n] }
}

func repeatTerm(s map[string]any) {
	terms := s["terms"].([]any)
	s["terms"] = append([]any{terms[0]}, terms...)
}

func double(s map[string]any) {
	queue := s["queue"].([]any)
	s["queue"] = append(queue, queue[0])
}

func nine(s map[string]any) {
	var queue []any
	for i := range v1alpha1.MaxQueue + 1 {
		queue = append(queue, encodeContender(contender(i), ""))
	}
	s["queue"], s["waiting"] = queue, int64(len(queue))
}

// grantTo makes of a lease that became available one that was granted in the same write.
func grantTo(a *actor) edits {
	return func(s map[string]any) {
		s["phase"], s["token"], s["handovers"] = "Held", s["token"].(int64)+1, s["handovers"].(int64)+1
		s["holder"] = encodeContender(a.contender, "2026-01-02T03:04:05.000000Z")
	}
}

// retry is the contender with a later request.
func retry(a *actor) v1alpha1.Contender {
	c := a.contender
	c.Ticket += 100
	return c
}
