// SPDX-License-Identifier: Apache-2.0

package fence

import (
	"time"

	"k8s.io/apimachinery/pkg/watch"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
)

// listen keeps the session's only watch: on the leases that it holds, whatever their number. Beside it, once per
// TTL, it lists them, so that a watch which has died without a word is noticed in time.
//
//	the watch                   | what is done
//	closes after some events    | watch again, from where it was
//	closes without any          | list first: the API server may not remember where it was
//	says that something's wrong | the same (410 Gone, above all)
//	is silent, the list is not  | the same, with a new connection
func (s *Session) listen(w watch.Interface, at string) {
	poll := time.NewTimer(jitter(s.pollEvery()))
	defer poll.Stop()
	defer func() {
		if w != nil {
			w.Stop()
		}
	}()
	var wait backoff
	heard := false
	for s.ctx.Err() == nil {
		if w == nil {
			if at == "" {
				at, _ = s.list()
			}
			if at != "" {
				w, _ = s.api.watchMine(s.ctx, s.self.SessionUID, at)
				heard = false
			}
			if w == nil {
				s.log.V(1).Info("no watch", "session", s.name)
				at = ""
				if !pause(s.ctx, wait.next()) {
					return
				}
				continue
			}
		}
		select {
		case <-s.ctx.Done():
			return
		case e, open := <-w.ResultChan():
			switch {
			case open && s.event(e, &at):
				heard = true
				wait.reset()
				continue
			case open || !heard:
				at = ""
				s.missed()
			}
			w.Stop()
			w = nil
			if at == "" && !pause(s.ctx, wait.next()) {
				return
			}
		case <-poll.C:
			if _, news := s.list(); news {
				s.missed()
				w.Stop()
				w, at = nil, ""
			}
			poll.Reset(jitter(s.pollEvery()))
		}
	}
}

// event takes in what the watch says, and where it is; false: something is wrong with it.
func (s *Session) event(e watch.Event, at *string) bool {
	l, ok := e.Object.(*v1alpha1.FencedLease)
	if !ok {
		return false
	}
	*at = l.ResourceVersion
	switch e.Type {
	case watch.Added, watch.Modified:
		s.observe(l)
	case watch.Deleted: // it carries the lease as it was while it was ours
		if l.Status != nil {
			s.gone(l.Name, l.Status.Token)
		}
	case watch.Bookmark:
	case watch.Error:
		return false
	}
	return true
}

// missed notes that grants may have come and gone unheard.
func (s *Session) missed() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.gaps++
}

// list looks at the leases that the session holds, and takes in what it had not heard of. One that it should hold and
// that is not there is read: it may have been acquired a moment after the list was made.
func (s *Session) list() (at string, news bool) {
	list, err := s.api.mine(s.ctx, s.self.SessionUID)
	if err != nil {
		return "", false
	}
	listed := map[string]bool{}
	for i := range list.Items {
		listed[list.Items[i].Name] = true
		news = s.observe(&list.Items[i]) || news
	}
	for _, name := range s.held() {
		if listed[name] {
			continue
		}
		if l, err := s.read(s.ctx, name); err == nil && l.Status != nil {
			news = !s.holds(name) || news
		}
	}
	return list.ResourceVersion, news
}

// held are the names of the leases that the session holds, as far as it knows.
func (s *Session) held() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var names []string
	for name, slot := range s.slots {
		if slot.term != nil {
			names = append(names, name)
		}
	}
	return names
}

func (s *Session) holds(name string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	slot := s.slots[name]
	return slot != nil && slot.term != nil
}
