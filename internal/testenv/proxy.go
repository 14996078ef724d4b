// SPDX-License-Identifier: Apache-2.0

package testenv

import (
	"context"
	"fmt"
	"net"
	"net/url"
	"sync"
	"time"

	"k8s.io/client-go/rest"
)

// Proxy is a TCP proxy on a loopback port that can misbehave. The methods that name a fault (Delay, Hold, BlackHole,
// SwallowAnswers, Drop) and Pass, the healthy state in which it starts, each replace the one before. They apply to
// open connections at once, and may be called at any time; bytes already on their way when one is called may be
// treated either way.
//
// A connection that has lost bytes cannot be healed: when BlackHole or SwallowAnswers ends, it is reset.
type Proxy struct {
	listener net.Listener
	dial     func(context.Context) (net.Conn, error)
	cancel   context.CancelFunc
	serving  sync.WaitGroup

	mu      sync.Mutex
	mode    mode
	changed chan struct{} // closed and replaced when mode changes
	links   map[*link]struct{}
}

// mode says what becomes of the bytes.
type mode struct {
	fault fault
	delay time.Duration // of fault delay
}

type fault int

const (
	pass fault = iota
	delay
	hold
	blackHole
	swallowAnswers
	drop
)

// NewProxy starts a proxy in front of target ("host:port"), which need not listen yet. Close it in the end.
func NewProxy(target string) (*Proxy, error) {
	return newProxy(func(ctx context.Context) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "tcp", target)
	})
}

func newProxy(dial func(context.Context) (net.Conn, error)) (*Proxy, error) {
	listener, err := net.Listen("tcp", loopback(0))
	if err != nil {
		return nil, fmt.Errorf("start proxy: %w", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	p := &Proxy{
		listener: listener, dial: dial, cancel: cancel,
		changed: make(chan struct{}), links: map[*link]struct{}{},
	}
	p.serving.Go(func() { p.accept(ctx) })
	return p, nil
}

// Addr is where the proxy listens, as "127.0.0.1:port".
func (p *Proxy) Addr() string { return p.listener.Addr().String() }

// Pass forwards everything: no fault.
func (p *Proxy) Pass() { p.set(mode{fault: pass}) }

// Delay forwards everything d later, in both directions, new connections included.
func (p *Proxy) Delay(d time.Duration) { p.set(mode{fault: delay, delay: d}) }

// Hold keeps everything back until the next change, and loses nothing: a short partition, healed by retransmission.
// What was held arrives late when Pass follows.
func (p *Proxy) Hold() { p.set(mode{fault: hold}) }

// BlackHole accepts connections and loses everything in both directions. Neither side hears that the other has gone.
func (p *Proxy) BlackHole() { p.set(mode{fault: blackHole}) }

// SwallowAnswers forwards what clients send and loses what comes back. New connections get no answer either, so a
// TLS client can send requests only through one that was open before.
func (p *Proxy) SwallowAnswers() { p.set(mode{fault: swallowAnswers}) }

// Drop resets all connections, and each new one as soon as it comes.
func (p *Proxy) Drop() { p.set(mode{fault: drop}) }

// Close ends the proxy and its connections. It is safe to repeat.
func (p *Proxy) Close() {
	_ = p.listener.Close()
	p.cancel()
	p.Drop()
	p.serving.Wait()
}

// Config returns a copy of cfg that goes through the proxy. The server's certificate is verified as before. Each
// client that is made from it has a transport, so connections, of its own: client-go shares one per TLS configuration
// otherwise, but not where a Dial function is set.
func (p *Proxy) Config(cfg *rest.Config) *rest.Config {
	through := rest.CopyConfig(cfg)
	host := url.URL{Scheme: "https", Host: p.Addr()}
	if target, err := url.Parse(cfg.Host); err == nil && target.Host != "" {
		host.Scheme, host.Path = target.Scheme, target.Path
		if through.ServerName == "" {
			through.ServerName = target.Hostname()
		}
	}
	through.Host = host.String()
	through.Dial = new(net.Dialer).DialContext
	return through
}

func (p *Proxy) set(m mode) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if m == p.mode {
		return
	}
	p.mode = m
	close(p.changed)
	p.changed = make(chan struct{})
	for l := range p.links {
		if m.fault == drop || (l.lost[request] || l.lost[answer]) && m.fault != blackHole {
			l.reset()
		}
	}
}

func (p *Proxy) accept(ctx context.Context) {
	for {
		client, err := p.listener.Accept()
		if ctx.Err() != nil {
			if err == nil {
				_ = client.Close()
			}
			return
		}
		if err == nil {
			p.serving.Go(func() { p.serve(ctx, client) })
		}
	}
}

func (p *Proxy) serve(ctx context.Context, client net.Conn) {
	l := &link{proxy: p}
	defer l.close()
	if !l.join(client) {
		return
	}
	if !l.admit(request) {
		l.discard(client)
		return
	}
	server, err := p.dial(ctx)
	if err != nil || !l.join(server) {
		return
	}
	var directions sync.WaitGroup
	directions.Go(func() { l.pump(client, server, request) })
	directions.Go(func() { l.pump(server, client, answer) })
	directions.Wait()
}
