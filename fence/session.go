// SPDX-License-Identifier: Apache-2.0

package fence

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/go-logr/logr"
	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/internal/protocol"
)

// cleanUpTimeout bounds what is done on the way out: a release, the deletion of the session. It is detached
// from the caller's cancellation, because that is when it is needed most.
const cleanUpTimeout = 10 * time.Second

var (
	errClosed = fmt.Errorf("the session is closed (%w)", ErrLost)
	errGone   = errors.New("its object is gone: it was expired or deleted")
)

// Session is what a process keeps alive to hold leases of one namespace: one object, one heartbeat and one watch,
// however many leases. All methods may be called concurrently.
//
// A session that is lost stays lost. To go on, make a new one: what was held with the old one may be somebody
// else's, and only a new grant brings a new token.
type Session struct {
	api       *api
	namespace string
	name      string
	self      v1alpha1.Contender // without ticket
	clock     clock
	log       logr.Logger
	metrics   Metrics

	ctx     context.Context // ends with the session
	cancel  context.CancelCauseFunc
	closing chan struct{}  // closed when Close begins: nobody waits any longer
	closed  chan struct{}  // closed when Close is done
	running sync.WaitGroup // goroutines; none is added after over is set
	calls   sync.WaitGroup // calls of acquire; none is added after ending is set
	kick    chan struct{}  // renew now

	mu         sync.Mutex
	object     *coordinationv1.Lease // as the API server answered last
	ttl        time.Duration         // of the last successful renewal
	wantTTL    time.Duration         // of the next renewal; never above ttl
	deadline   time.Duration         // when the session counts as lost, by clock
	due        time.Duration         // when to renew next, by clock
	beatErr    error                 // why the last renewal failed; nil after a success
	renewed    chan struct{}         // closed, and replaced, after each renewal
	lastTicket int64
	slots      map[string]*slot
	ending     bool  // Close has begun: what is granted now goes back at once
	gaps       int   // how often the watch may have missed something
	over       error // why the session is over; nil while it lives
	closeErr   error // what Close returns, once closed is closed
	closeOnce  sync.Once
}

// NewSession makes a session and begins to keep it alive; it returns when the API server has stored the session,
// and has shown that the leases of its namespace can be read and watched. ctx bounds only that; what ends the
// session is Close. Values of ctx, such as a logr.Logger, live on.
//
// The errors say what is missing: no answer, no FencedLease installed, no such namespace, no rights.
func NewSession(ctx context.Context, cfg *rest.Config, options Options) (*Session, error) {
	o, err := options.withDefaults()
	if err != nil {
		return nil, fmt.Errorf("new session: %w", err)
	}
	a, err := newAPI(cfg, o.Namespace)
	if err != nil {
		return nil, fmt.Errorf("new session: %w", err)
	}
	user, err := a.whoami(ctx)
	if err != nil {
		return nil, explain(err, "new session: ask the API server who we are", o.Namespace, a.host)
	}

	s := &Session{
		api: a, namespace: o.Namespace, clock: o.clock, metrics: o.Metrics,
		log:     logr.FromContextOrDiscard(ctx),
		closing: make(chan struct{}),
		closed:  make(chan struct{}),
		kick:    make(chan struct{}, 1),
		renewed: make(chan struct{}),
		ttl:     o.TTL,
		wantTTL: o.TTL,
		slots:   map[string]*slot{},
	}
	s.self = v1alpha1.Contender{
		Identity: o.Identity,
		User:     user.Username,
		PodUID:   types.UID(extra(user, v1alpha1.PodUIDExtra)),
	}
	sent := s.clock()
	s.object, err = a.createSession(ctx, s.newObject(podOf(user, inPod(), cfg, os.Getenv).owners(o.Namespace)))
	if err != nil {
		return nil, explain(err, fmt.Sprintf("new session: create it in namespace %q", o.Namespace), o.Namespace, a.host)
	}
	s.confirm(sent, o.TTL)
	s.name, s.self.Session, s.self.SessionUID = s.object.Name, s.object.Name, s.object.UID

	w, at, err := s.firstWatch(ctx)
	if err != nil {
		detached, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanUpTimeout)
		defer cancel()
		_ = a.deleteSession(detached, s.name, s.self.SessionUID) // it expires anyway; the first error is the one to tell
		return nil, explain(err, fmt.Sprintf("new session: read the leases of namespace %q", o.Namespace), o.Namespace, a.host)
	}
	s.ctx, s.cancel = context.WithCancelCause(context.WithoutCancel(ctx))
	s.running.Go(s.keepTime)
	s.running.Go(s.heartbeat)
	s.running.Go(func() { s.listen(w, at) })
	return s, nil
}

// firstWatch begins to watch, so that what is missing shows now and not at the first grant.
func (s *Session) firstWatch(ctx context.Context) (watch.Interface, string, error) {
	list, err := s.api.mine(ctx, s.self.SessionUID)
	if err != nil {
		return nil, "", err
	}
	w, err := s.api.watchMine(context.WithoutCancel(ctx), s.self.SessionUID, list.ResourceVersion)
	return w, list.ResourceVersion, err
}

// newObject is the session as it is first stored. Never a finalizer: a dead session must be able to go.
func (s *Session) newObject(owners []metav1.OwnerReference) *coordinationv1.Lease {
	now := metav1.NowMicro()
	seconds := int32(s.ttl / time.Second)
	l := &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{
			GenerateName:    namePrefix(s.self.Identity),
			Namespace:       s.namespace,
			Labels:          map[string]string{v1alpha1.SessionLabel: "true"},
			Annotations:     map[string]string{v1alpha1.UserAnnotation: s.self.User},
			OwnerReferences: owners,
		},
		Spec: coordinationv1.LeaseSpec{
			HolderIdentity:       &s.self.Identity,
			LeaseDurationSeconds: &seconds,
			AcquireTime:          &now,
			RenewTime:            &now,
		},
	}
	if s.self.PodUID != "" {
		l.Annotations[v1alpha1.PodUIDAnnotation] = string(s.self.PodUID)
	}
	return l
}

// Done is closed when the session is lost or closed.
func (s *Session) Done() <-chan struct{} { return s.Context().Done() }

// Context ends when the session is lost, then with a cause that matches ErrLost, or closed, with
// context.Canceled. Its Err asks the clock first: a process that was paused for too long finds its session lost
// before it does anything with it.
func (s *Session) Context() context.Context {
	_ = s.Err()
	return checkedContext{Context: s.ctx, check: s.Err}
}

// Err is nil while the session lives. Afterwards it matches ErrLost and says why.
func (s *Session) Err() error {
	s.mu.Lock()
	over, late := s.over, s.clock() >= s.deadline
	s.mu.Unlock()
	if over != nil || !late {
		return over
	}
	s.lose(nil)
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.over
}

// Name is the name of the session's object: a coordination.k8s.io/v1 Lease.
func (s *Session) Name() string { return s.name }

// checkedContext is a context that asks the clock before it says that it has not ended.
type checkedContext struct {
	context.Context
	check func() error
}

func (c checkedContext) Err() error {
	_ = c.check()
	return c.Context.Err()
}

func (c checkedContext) Done() <-chan struct{} {
	_ = c.check()
	return c.Context.Done()
}

// lose ends the session, and all terms with it, for that reason; nil: because it could not be renewed in time.
// It is never renewed again. Its object is deleted, so that others need not wait for its expiry; the terms
// themselves are left to the controller, which begins the cooldown where one is asked for.
func (s *Session) lose(why error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.over != nil {
		return
	}
	if why == nil {
		why = fmt.Errorf("not renewed for %s of its %s", (s.ttl - protocol.Margin(s.ttl)), s.ttl)
		if s.beatErr != nil {
			why = fmt.Errorf("%w; the last attempt: %w", why, s.beatErr)
		}
	}
	s.over = fmt.Errorf("session %q is %w: %w", s.name, ErrLost, why)
	for _, slot := range s.slots {
		if slot.term != nil {
			s.endTerm(slot, s.over)
		}
	}
	s.cancel(s.over)
	s.running.Go(func() {
		err := s.delete(context.WithoutCancel(s.ctx))
		s.log.V(1).Info("session lost", "session", s.name, "reason", why.Error(), "deleted", err == nil)
	})
}

// Close releases all leases, which hands them over, and then deletes the session. It ends the work contexts
// first. Whoever waits in Acquire gets an error that matches ErrLost. Close goes on when ctx is cancelled, for at
// most half a minute; what it could not do, expiry does. Repeated, it returns the same.
func (s *Session) Close(ctx context.Context) error {
	s.closeOnce.Do(func() {
		s.mu.Lock()
		s.ending = true
		s.mu.Unlock()
		close(s.closing)
		err := s.releaseAll(ctx)
		s.calls.Wait()

		s.mu.Lock()
		lost := s.over != nil
		if !lost {
			s.over = errClosed
			s.cancel(context.Canceled)
		}
		s.mu.Unlock()

		s.running.Wait()
		if !lost {
			err = errors.Join(err, s.delete(ctx))
		}
		s.closeErr = err
		close(s.closed)
	})
	<-s.closed
	return s.closeErr
}

// releaseAll ends the contexts of all terms before it sends the first release.
func (s *Session) releaseAll(ctx context.Context) error {
	s.mu.Lock()
	var terms []*Held
	for _, slot := range s.slots {
		if slot.term != nil {
			terms = append(terms, slot.term)
			slot.term.giveUp()
		}
	}
	s.mu.Unlock()

	errs := make([]error, len(terms))
	var all sync.WaitGroup
	for i, h := range terms {
		all.Go(func() {
			if err := h.Release(ctx); !errors.Is(err, ErrLost) { // lost is over, too
				errs[i] = err
			}
		})
	}
	all.Wait()
	return errors.Join(errs...)
}

// delete removes the session's object, and nothing that took its name.
func (s *Session) delete(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanUpTimeout)
	defer cancel()
	defer s.api.closeIdle()
	var wait backoff
	for {
		err := s.api.deleteSession(ctx, s.name, s.self.SessionUID)
		switch {
		case err == nil, apierrors.IsNotFound(err), apierrors.IsConflict(err): // gone, or another's
			return nil
		case definite(err), !pause(ctx, wait.next()):
			return s.explain(err, fmt.Sprintf("delete session %q", s.name))
		}
	}
}
