// SPDX-License-Identifier: Apache-2.0

package protocol_test

import (
	"encoding/json"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/internal/protocol"
)

// FuzzPatch: on any lease that JSON can say, however odd, no transition panics, the lease stays as it was, and a
// patch makes of a lease that has its lists what Apply makes of it.
func FuzzPatch(f *testing.F) {
	for _, l := range []builder{fresh(), available(), held("a", 1), held("a", 1).queue(contender("b", 1)).history(10), cooling().queue(contender("b", 1))} {
		f.Add(encode(f, l.FencedLease))
	}
	f.Add([]byte(`{"status":{}}`))
	f.Add([]byte(`{"status":{"phase":"Held"}}`))
	f.Add([]byte(`{"status":{"phase":"Available","holder":{}}}`))
	f.Add([]byte(`{"status":{"phase":"Cooldown","queue":[{}],"waiting":-5,"token":-9223372036854775808}}`))
	f.Add([]byte(`{"status":{"phase":"Held","holder":{},"token":9223372036854775807,"terms":[{},{},{},{},{},{},{},{},{},{},{}]}}`))
	f.Fuzz(func(t *testing.T, doc []byte) {
		var l v1alpha1.FencedLease
		if json.Unmarshal(doc, &l) != nil {
			return
		}
		before, err := json.Marshal(&l)
		if err != nil {
			return // a time that JSON cannot say
		}
		for _, move := range moves(&l) {
			tryMove(t, &l, move, before)
		}
		view := protocol.View{Now: noon, HeldFor: time.Hour, CooledFor: time.Hour, QueuedFor: time.Hour}
		protocol.Settle(&l, view)
		view.Sessions = map[types.UID]protocol.Session{"uid-a": session("a")}
		view.Order = []protocol.Place{{SessionUID: "uid-a", Ticket: 1}}
		protocol.Settle(&l, view)
		if after, _ := json.Marshal(&l); string(after) != string(before) {
			t.Errorf("the lease was changed:\nbefore %s\nafter  %s", before, after)
		}
	})
}

func tryMove(t *testing.T, l *v1alpha1.FencedLease, move protocol.Transition, doc []byte) {
	t.Helper()
	patch, next, err := protocol.Patch(l, move)
	stored := l.Generation != 0 && l.ResourceVersion != "" // every stored object has both
	if err != nil || !stored || l.Status != nil && shape(l.Status) != "" {
		return
	}
	got, err := apply(t, doc, patch)
	if err != nil {
		t.Fatalf("%s on %s: %v\n%s", move, doc, err, patch)
	}
	// Through the type once more, since an odd lease may say absent or empty where ours says neither.
	if a, b := canonical(t, encode(t, decode(t, got))), canonical(t, encode(t, next)); a != b {
		t.Fatalf("%s on %s:\nApply: %s\nPatch: %s", move, doc, b, a)
	}
}
