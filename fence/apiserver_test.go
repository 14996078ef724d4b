// SPDX-License-Identifier: Apache-2.0

package fence

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	jsonpatch "github.com/evanphx/json-patch/v5"
	authenticationv1 "k8s.io/api/authentication/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/internal/protocol"
)

// apiServer is the part of an API server that a session needs, in memory and behind a RoundTripper, so that whole
// clients run in the virtual time of testing/synctest. It keeps one revision, as etcd does, checks preconditions, and
// its watches select as the real ones do. It knows no rules, policies and rights: those are tested on a real one.
type apiServer struct {
	// fault may do something else with a request than to handle it; nil handles it. It is set before the first request
	// or through setFault.
	fault fault

	mu       sync.Mutex
	revision int
	sessions map[string]*coordinationv1.Lease
	leases   map[string]*v1alpha1.FencedLease
	watches  map[*memWatch]struct{}
	history  []change
	calls    []call
}

// change is what a watch that begins later must hear of, too.
type change struct {
	revision  int
	old, next *v1alpha1.FencedLease
}

// fault handles a request; next does what the server would have done.
type fault func(r *http.Request, next func() *http.Response) (*http.Response, error)

// call is a request that the server has handled.
type call struct {
	what string // METHOD kind
	at   time.Time
}

type memWatch struct {
	uid  types.UID
	pipe *io.PipeWriter
	send chan []byte
}

func newAPIServer(leases ...string) *apiServer {
	a := &apiServer{
		revision: 100,
		sessions: map[string]*coordinationv1.Lease{},
		leases:   map[string]*v1alpha1.FencedLease{},
		watches:  map[*memWatch]struct{}{},
	}
	for _, name := range leases {
		a.addLease(name, 15)
		a.do(name, protocol.Initialise(time.Now()))
	}
	return a
}

func (a *apiServer) config() *rest.Config { return &rest.Config{Host: "http://api", Transport: a} }

// addLease creates a lease that is not initialised.
func (a *apiServer) addLease(name string, seconds int32) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.revision++
	a.leases[name] = &v1alpha1.FencedLease{
		TypeMeta: metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion.String(), Kind: "FencedLease"},
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "default", Name: name, UID: types.UID(fmt.Sprintf("lease-%d", a.revision)),
			ResourceVersion: strconv.Itoa(a.revision), Generation: 1,
		},
		Spec: v1alpha1.FencedLeaseSpec{LeaseDurationSeconds: seconds},
	}
}

// deleteLease deletes a lease, and its watchers hear of it.
func (a *apiServer) deleteLease(name string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.revision++
	old := a.leases[name]
	delete(a.leases, name)
	a.tell(old, nil)
}

// do applies a transition, as the controller or another holder would.
func (a *apiServer) do(name string, t protocol.Transition) *v1alpha1.FencedLease {
	a.mu.Lock()
	defer a.mu.Unlock()
	next, err := protocol.Apply(a.leases[name], t)
	if err != nil {
		panic(err)
	}
	a.store(next)
	return next
}

// change changes a lease as its editor would.
func (a *apiServer) change(name string, f func(l *v1alpha1.FencedLease)) {
	a.mu.Lock()
	defer a.mu.Unlock()
	next := a.leases[name].DeepCopy()
	f(next)
	next.Generation++
	a.store(next)
}

func (a *apiServer) store(next *v1alpha1.FencedLease) {
	old := a.leases[next.Name]
	a.revision++
	next.ResourceVersion = strconv.Itoa(a.revision)
	a.leases[next.Name] = next
	a.tell(old, next)
}

// tell sends the event of a change to each watch: with a selector an object comes and goes.
func (a *apiServer) tell(old, next *v1alpha1.FencedLease) {
	c := change{revision: a.revision, old: old, next: next}
	a.history = append(a.history, c)
	for w := range a.watches {
		w.hear(c)
	}
}

func (w *memWatch) hear(c change) {
	was, is := selected(c.old, w.uid), selected(c.next, w.uid)
	switch {
	case was && is:
		w.event(watch.Modified, c.next)
	case is:
		w.event(watch.Added, c.next)
	case was:
		gone := c.old.DeepCopy()
		gone.ResourceVersion = strconv.Itoa(c.revision)
		w.event(watch.Deleted, gone)
	}
}

func selected(l *v1alpha1.FencedLease, uid types.UID) bool {
	return l != nil && l.Status != nil && l.Status.Holder != nil && l.Status.Holder.SessionUID == uid
}

func (w *memWatch) event(kind watch.EventType, object any) {
	raw, err := json.Marshal(object)
	if err != nil {
		panic(err)
	}
	text, err := json.Marshal(map[string]any{"type": kind, "object": json.RawMessage(raw)})
	if err != nil {
		panic(err)
	}
	w.send <- text
}

// closeWatches ends all watches, with an ERROR event of that code before, unless it is 0.
func (a *apiServer) closeWatches(code int32) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for w := range a.watches {
		if code != 0 {
			w.event(watch.Error, metav1.Status{
				TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"},
				Status:   metav1.StatusFailure, Code: code, Reason: metav1.StatusReasonExpired,
			})
		}
		close(w.send)
		delete(a.watches, w)
	}
}

// muteWatches makes the watches silent for ever, without closing them.
func (a *apiServer) muteWatches() {
	a.mu.Lock()
	defer a.mu.Unlock()
	clear(a.watches)
}

func (a *apiServer) watchers() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.watches)
}

func (a *apiServer) setFault(f fault) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.fault = f
}

func (a *apiServer) lease(name string) *v1alpha1.FencedLease {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.leases[name].DeepCopy()
}

func (a *apiServer) session(name string) *coordinationv1.Lease {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.sessions[name].DeepCopy()
}

func (a *apiServer) deleteSession(name string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.sessions, name)
}

// handled are the times of the calls of that kind.
func (a *apiServer) handled(what string) []time.Time {
	a.mu.Lock()
	defer a.mu.Unlock()
	var times []time.Time
	for _, c := range a.calls {
		if c.what == what {
			times = append(times, c.at)
		}
	}
	return times
}

// RoundTrip is the network.
func (a *apiServer) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Body != nil {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return nil, err
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
	}
	a.mu.Lock()
	f := a.fault
	a.mu.Unlock()
	if err := r.Context().Err(); err != nil {
		return nil, err
	}
	next := func() *http.Response { return a.handle(r) }
	if f != nil {
		return f(r, next)
	}
	return next(), nil
}

// kindOfCall names a request.
func kindOfCall(r *http.Request) string {
	kind := "lease"
	switch {
	case strings.Contains(r.URL.Path, "selfsubjectreviews"):
		kind = "review"
	case strings.Contains(r.URL.Path, "coordination.k8s.io"):
		kind = "session"
	case r.URL.Query().Get("watch") != "":
		kind = "watch"
	case strings.HasSuffix(r.URL.Path, "/fencedleases"):
		kind = "leases"
	}
	return r.Method + " " + kind
}

func (a *apiServer) handle(r *http.Request) *http.Response {
	var body []byte
	if r.Body != nil {
		body = []byte(readBody(r))
	}
	parts := strings.Split(strings.Trim(r.URL.Path, "/"), "/")
	name := parts[len(parts)-1]
	what := kindOfCall(r)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.calls = append(a.calls, call{what: what, at: time.Now()})
	switch what {
	case "POST review":
		return answerWith(http.StatusCreated, &authenticationv1.SelfSubjectReview{
			TypeMeta: metav1.TypeMeta{APIVersion: "authentication.k8s.io/v1", Kind: "SelfSubjectReview"},
			Status:   authenticationv1.SelfSubjectReviewStatus{UserInfo: authenticationv1.UserInfo{Username: "user"}},
		}, nil)
	case "POST session":
		return a.create(body)
	case "GET session":
		return answerWith(http.StatusOK, a.sessions[name], notFound("leases", name, a.sessions[name] == nil))
	case "PUT session":
		return a.put(name, body)
	case "DELETE session":
		return a.remove(name, body)
	case "GET leases":
		return answerWith(http.StatusOK, a.list(r), nil)
	case "GET watch":
		return a.watch(r)
	case "GET lease":
		return answerWith(http.StatusOK, a.leases[name], notFound("fencedleases", name, a.leases[name] == nil))
	case "PATCH lease":
		if r.URL.Query().Get("fieldValidation") != "Strict" {
			return answerWith(0, nil, apierrors.NewBadRequest("a transition is written strictly"))
		}
		return a.patch(parts[len(parts)-2], body)
	}
	return answerWith(0, nil, apierrors.NewMethodNotSupported(schema.GroupResource{}, what))
}

func notFound(resource, name string, missing bool) *apierrors.StatusError {
	if !missing {
		return nil
	}
	return apierrors.NewNotFound(schema.GroupResource{Resource: resource}, name)
}

func answerWith(code int, object any, err *apierrors.StatusError) *http.Response {
	if err != nil {
		err.ErrStatus.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}
		code, object = int(err.ErrStatus.Code), err.ErrStatus
	}
	text, _ := json.Marshal(object)
	return &http.Response{
		StatusCode: code, Status: http.StatusText(code), Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: http.Header{"Content-Type": {"application/json"}},
		Body:   io.NopCloser(bytes.NewReader(text)),
	}
}

func (a *apiServer) create(body []byte) *http.Response {
	s := &coordinationv1.Lease{}
	if err := json.Unmarshal(body, s); err != nil {
		panic(err)
	}
	a.revision++
	s.TypeMeta = metav1.TypeMeta{APIVersion: "coordination.k8s.io/v1", Kind: "Lease"}
	s.Name = s.GenerateName + strconv.Itoa(a.revision)
	s.UID = types.UID(fmt.Sprintf("session-%d", a.revision))
	s.ResourceVersion = strconv.Itoa(a.revision)
	a.sessions[s.Name] = s
	return answerWith(http.StatusCreated, s, nil)
}

func (a *apiServer) put(name string, body []byte) *http.Response {
	s := &coordinationv1.Lease{}
	if err := json.Unmarshal(body, s); err != nil {
		panic(err)
	}
	resource := schema.GroupResource{Resource: "leases"}
	old := a.sessions[name]
	switch {
	case s.UID == "" || s.ResourceVersion == "":
		return answerWith(0, nil, apierrors.NewBadRequest("a session is written with UID and resourceVersion"))
	case old == nil || old.UID != s.UID || old.ResourceVersion != s.ResourceVersion:
		return answerWith(0, nil, apierrors.NewConflict(resource, name, errors.New("changed")))
	case !s.Spec.RenewTime.After(old.Spec.RenewTime.Time):
		return answerWith(0, nil, apierrors.NewBadRequest("renewTime does not grow"))
	case *s.Spec.LeaseDurationSeconds > *old.Spec.LeaseDurationSeconds:
		return answerWith(0, nil, apierrors.NewForbidden(resource, name, errors.New("the TTL may only shrink")))
	}
	before, _ := protocol.ParseWants(old.Annotations[v1alpha1.WaitingForAnnotation])
	after, err := protocol.ParseWants(s.Annotations[v1alpha1.WaitingForAnnotation])
	if err != nil {
		return answerWith(0, nil, apierrors.NewForbidden(resource, name, err))
	}
	added := 0
	for lease, ticket := range after {
		if before[lease] != ticket {
			added++
		}
	}
	if added > 1 {
		return answerWith(0, nil, apierrors.NewForbidden(resource, name, errors.New("more than one want was added")))
	}
	a.revision++
	s.ResourceVersion = strconv.Itoa(a.revision)
	a.sessions[name] = s
	return answerWith(http.StatusOK, s, nil)
}

func (a *apiServer) remove(name string, body []byte) *http.Response {
	options := metav1.DeleteOptions{}
	if err := json.Unmarshal(body, &options); err != nil {
		panic(err)
	}
	old := a.sessions[name]
	switch {
	case old == nil:
		return answerWith(0, nil, notFound("leases", name, true))
	case options.Preconditions == nil || options.Preconditions.UID == nil:
		return answerWith(0, nil, apierrors.NewBadRequest("a session is deleted by UID"))
	case *options.Preconditions.UID != old.UID:
		return answerWith(0, nil, apierrors.NewConflict(schema.GroupResource{Resource: "leases"}, name, errors.New("UID")))
	}
	delete(a.sessions, name)
	return answerWith(http.StatusOK, &metav1.Status{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, Status: "Success"}, nil)
}

func uidOf(r *http.Request) types.UID {
	_, uid, _ := strings.Cut(r.URL.Query().Get("fieldSelector"), "status.holder.sessionUID=")
	return types.UID(uid)
}

func (a *apiServer) list(r *http.Request) *v1alpha1.FencedLeaseList {
	list := &v1alpha1.FencedLeaseList{
		TypeMeta: metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion.String(), Kind: "FencedLeaseList"},
		ListMeta: metav1.ListMeta{ResourceVersion: strconv.Itoa(a.revision)},
		Items:    []v1alpha1.FencedLease{},
	}
	for _, l := range a.leases {
		if selected(l, uidOf(r)) {
			list.Items = append(list.Items, *l)
		}
	}
	return list
}

// watch begins a watch, after the revision that was asked for.
func (a *apiServer) watch(r *http.Request) *http.Response {
	from, to := io.Pipe()
	w := &memWatch{uid: uidOf(r), pipe: to, send: make(chan []byte, 1000)}
	a.watches[w] = struct{}{}
	after, err := strconv.Atoi(r.URL.Query().Get("resourceVersion"))
	if err != nil {
		return answerWith(0, nil, apierrors.NewBadRequest("a watch begins at a resourceVersion"))
	}
	for _, c := range a.history {
		if c.revision > after {
			w.hear(c)
		}
	}
	ctx := r.Context()
	go func() {
		<-ctx.Done()
		_ = to.CloseWithError(ctx.Err())
	}()
	go func() {
		for {
			select {
			case text, open := <-w.send:
				if !open {
					_ = to.Close()
					return
				}
				_, _ = to.Write(append(text, '\n'))
			case <-ctx.Done():
				a.mu.Lock()
				defer a.mu.Unlock()
				delete(a.watches, w)
				return
			}
		}
	}()
	return &http.Response{
		StatusCode: http.StatusOK, Status: "OK", Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: http.Header{"Content-Type": {"application/json"}}, Body: from,
	}
}

func (a *apiServer) patch(name string, body []byte) *http.Response {
	old := a.leases[name]
	if old == nil {
		return answerWith(0, nil, notFound("fencedleases", name, true))
	}
	patch, err := jsonpatch.DecodePatch(body)
	if err != nil {
		panic(err)
	}
	text, err := json.Marshal(old)
	if err != nil {
		panic(err)
	}
	patched, err := patch.Apply(text)
	if err != nil { // as the API server says it: a 422 without causes
		return answerWith(0, nil, apierrors.NewGenericServerResponse(http.StatusUnprocessableEntity, "", schema.GroupResource{}, "", err.Error(), 0, false))
	}
	next := &v1alpha1.FencedLease{}
	if err := json.Unmarshal(patched, next); err != nil {
		panic(err)
	}
	a.store(next)
	return answerWith(http.StatusOK, next, nil)
}

// The faults.

// forCalls applies f to the first n calls of that kind; n below 0: to all.
func forCalls(what string, n int, f fault) fault {
	var mu sync.Mutex
	return func(r *http.Request, next func() *http.Response) (*http.Response, error) {
		mu.Lock()
		hit := kindOfCall(r) == what && n != 0
		if hit {
			n--
		}
		mu.Unlock()
		if hit {
			return f(r, next)
		}
		return next(), nil
	}
}

// lostAnswer handles the request and loses the answer.
func lostAnswer(r *http.Request, next func() *http.Response) (*http.Response, error) {
	next()
	return blackHole(r, nil)
}

// blackHole loses the request. The caller hears nothing until it gives up.
func blackHole(r *http.Request, _ func() *http.Response) (*http.Response, error) {
	<-r.Context().Done()
	return nil, r.Context().Err()
}

// late lets the caller give up, and handles the request d after it was sent.
func late(d time.Duration) fault {
	return func(r *http.Request, next func() *http.Response) (*http.Response, error) {
		time.AfterFunc(d, func() { next() })
		return blackHole(r, nil)
	}
}

// slow handles the request and answers d later.
func slow(d time.Duration) fault {
	return func(r *http.Request, next func() *http.Response) (*http.Response, error) {
		response := next()
		select {
		case <-time.After(d):
			return response, nil
		case <-r.Context().Done():
			return nil, r.Context().Err()
		}
	}
}

// refused answers with an error instead.
func refused(err *apierrors.StatusError) fault {
	return func(*http.Request, func() *http.Response) (*http.Response, error) {
		return answerWith(0, nil, err), nil
	}
}

// startKey is the key of when a session was opened, in its context.
type startKey struct{}

func readBody(r *http.Request) string {
	body, _ := io.ReadAll(r.Body)
	r.Body = io.NopCloser(bytes.NewReader(body))
	return string(body)
}

// open makes a session on the server, which is closed with the test.
func (a *apiServer) open(t *testing.T, o Options) *Session {
	t.Helper()
	if o.clock == nil {
		o.clock = monotonic() // virtual
	}
	s, err := NewSession(context.WithValue(t.Context(), startKey{}, time.Now()), a.config(), o)
	if err != nil {
		t.Fatalf("NewSession: %v", err)
	}
	t.Cleanup(func() { _ = s.Close(context.Background()) })
	return s
}
