// SPDX-License-Identifier: Apache-2.0

package testenv_test

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"github.com/fencedlease/fencedlease/internal/testenv"
)

// quiet is how long a test listens before it says that nothing comes.
const quiet = 100 * time.Millisecond

// server answers each line with its prefix and the line, and tells what it hears.
type server struct {
	net.Listener

	heard chan string // lines, and "EOF" or an error at the end of a connection
}

func newServer(t *testing.T, prefix string) *server {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })
	s := &server{Listener: listener, heard: make(chan string, 100)}
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go s.serve(conn, prefix)
		}
	}()
	return s
}

func (s *server) serve(conn net.Conn, prefix string) {
	defer conn.Close()
	for lines := bufio.NewReader(conn); ; {
		line, err := lines.ReadString('\n')
		if err != nil {
			s.heard <- err.Error()
			return
		}
		s.heard <- line
		_, _ = io.WriteString(conn, prefix+line)
	}
}

func (s *server) hears(t *testing.T, want string) {
	t.Helper()
	select {
	case got := <-s.heard:
		if got != want {
			t.Errorf("the server heard %q, want %q", got, want)
		}
	case <-time.After(10 * time.Second):
		t.Errorf("the server did not hear %q", want)
	}
}

func (s *server) hearsNothing(t *testing.T) {
	t.Helper()
	select {
	case got := <-s.heard:
		t.Errorf("the server heard %q, want nothing", got)
	case <-time.After(quiet):
	}
}

// peer is the client's side of a connection.
type peer struct {
	net.Conn

	lines *bufio.Reader
}

func dial(t *testing.T, addr string) *peer {
	t.Helper()
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return &peer{conn, bufio.NewReader(conn)}
}

func (p *peer) says(t *testing.T, line string) {
	t.Helper()
	if _, err := io.WriteString(p, line); err != nil {
		t.Errorf("say %q: %v", line, err)
	}
}

func (p *peer) hears(t *testing.T, want string) {
	t.Helper()
	_ = p.SetReadDeadline(time.Now().Add(10 * time.Second))
	if got, err := p.lines.ReadString('\n'); got != want || err != nil {
		t.Errorf("the client heard %q (error %v), want %q", got, err, want)
	}
}

func (p *peer) hearsNothing(t *testing.T) {
	t.Helper()
	_ = p.SetReadDeadline(time.Now().Add(quiet))
	if got, err := p.lines.ReadString('\n'); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the client heard %q (error %v), want nothing", got, err)
	}
}

func (p *peer) isCut(t *testing.T) {
	t.Helper()
	_ = p.SetReadDeadline(time.Now().Add(10 * time.Second))
	if got, err := p.lines.ReadString('\n'); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the client heard %q (error %v), want the end of the connection", got, err)
	}
}

// proxied returns a server, a proxy before it, and a connection that works.
func proxied(t *testing.T) (*server, *testenv.Proxy, *peer) {
	t.Helper()
	s := newServer(t, "re: ")
	p, err := testenv.NewProxy(s.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	c := dial(t, p.Addr())
	works(t, c, s)
	return s, p, c
}

func works(t *testing.T, c *peer, s *server) {
	t.Helper()
	c.says(t, "hello\n")
	s.hears(t, "hello\n")
	c.hears(t, "re: hello\n")
}

func TestProxyPass(t *testing.T) {
	s, _, c := proxied(t)
	_ = c.Close()
	s.hears(t, "EOF")
}

func TestProxyDelay(t *testing.T) {
	s, p, c := proxied(t)
	p.Delay(quiet)
	began := time.Now()
	works(t, c, s)
	if took := time.Since(began); took < 2*quiet {
		t.Errorf("there and back took %s, want at least %s", took, 2*quiet)
	}

	p.Delay(time.Hour)
	c.says(t, "again\n")
	s.hearsNothing(t)
	p.Pass()
	c.hears(t, "re: again\n")
}

func TestProxyHold(t *testing.T) {
	s, p, c := proxied(t)
	p.Hold()
	c.says(t, "one\n")
	fresh := dial(t, p.Addr())
	fresh.says(t, "two\n")
	s.hearsNothing(t)
	c.hearsNothing(t)

	p.Pass()
	c.hears(t, "re: one\n")
	fresh.hears(t, "re: two\n")
}

func TestProxyBlackHole(t *testing.T) {
	s, p, c := proxied(t)
	quits := dial(t, p.Addr())
	works(t, quits, s)

	p.BlackHole()
	c.says(t, "lost\n")
	c.hearsNothing(t)
	_ = quits.Close()
	fresh := dial(t, p.Addr())
	fresh.says(t, "lost, too\n")
	fresh.hearsNothing(t)
	s.hearsNothing(t) // no end of a connection either

	p.Pass()
	c.isCut(t)
	fresh.isCut(t)
	for range 2 { // c and quits
		<-s.heard
	}
	works(t, dial(t, p.Addr()), s)
}

func TestProxySwallowAnswers(t *testing.T) {
	s, p, c := proxied(t)
	unused := dial(t, p.Addr())
	works(t, unused, s)

	p.SwallowAnswers()
	for _, line := range []string{"one\n", "two\n"} {
		c.says(t, line)
		s.hears(t, line)
	}
	c.hearsNothing(t)

	p.Pass()
	c.isCut(t)
	<-s.heard
	works(t, unused, s) // it has lost nothing
}

func TestProxyDrop(t *testing.T) {
	s, p, c := proxied(t)
	p.Drop()
	c.isCut(t)
	<-s.heard
	if conn, err := net.Dial("tcp", p.Addr()); err == nil { // or it was reset while it connected
		(&peer{conn, bufio.NewReader(conn)}).isCut(t)
	}
	s.hearsNothing(t)

	p.Pass()
	works(t, dial(t, p.Addr()), s)
}

func TestProxyWithoutServer(t *testing.T) {
	s, p, _ := proxied(t)
	_ = s.Listener.Close()
	dial(t, p.Addr()).isCut(t)
}

func TestProxyCloseInAnyState(t *testing.T) {
	for name, fault := range map[string]func(*testenv.Proxy){
		"pass":            (*testenv.Proxy).Pass,
		"delay":           func(p *testenv.Proxy) { p.Delay(time.Hour) },
		"hold":            (*testenv.Proxy).Hold,
		"black hole":      (*testenv.Proxy).BlackHole,
		"swallow answers": (*testenv.Proxy).SwallowAnswers,
		"drop":            (*testenv.Proxy).Drop,
	} {
		t.Run(name, func(t *testing.T) {
			_, p, c := proxied(t)
			fault(p)
			_, _ = io.WriteString(c, "on its way\n")
			p.Close()
			p.Close()
			if conn, err := net.Dial("tcp", p.Addr()); err == nil {
				_ = conn.Close()
				t.Error("a closed proxy accepts connections")
			}
		})
	}
}

func TestBalancer(t *testing.T) {
	ready := func(context.Context) error { return nil }
	a, b := newServer(t, "a: "), newServer(t, "b: ")
	state := make(chan testenv.Check, 1)
	state <- ready
	balancer, err := testenv.NewBalancer(
		testenv.Backend{Addr: a.Addr().String()},
		testenv.Backend{Addr: b.Addr().String(), Ready: func(ctx context.Context) error {
			check := <-state
			state <- check
			return check(ctx)
		}},
	)
	if err != nil {
		t.Fatal(err)
	}
	defer balancer.Close()
	answers := func(wants ...string) {
		t.Helper()
		for _, want := range wants {
			c := dial(t, balancer.Addr())
			c.says(t, "hello\n")
			c.hears(t, want+": hello\n")
		}
	}

	answers("a", "b", "a", "b")
	<-state
	state <- never
	answers("a", "a", "a")
	<-state
	state <- ready
	answers("b", "a", "b")
	_ = a.Close()
	answers("b", "b")
	_ = b.Close()
	dial(t, balancer.Addr()).isCut(t)
}

func TestHTTPOK(t *testing.T) {
	s := newServer(t, "HTTP/1.1 503 Later\r\nContent-Length: 5\r\n\r\nfull ")
	if err := testenv.HTTPOK("http://"+s.Addr().String()+"/readyz", nil)(t.Context()); err == nil {
		t.Error("no error for status 503")
	}
}
