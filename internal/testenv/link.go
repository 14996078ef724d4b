// SPDX-License-Identifier: Apache-2.0

package testenv

import (
	"io"
	"net"
	"time"
)

// link is one connection through a Proxy. Its fields are guarded by the proxy's mutex.
type link struct {
	proxy *Proxy
	ends  []net.Conn // the client's, then the server's
	gone  bool
	lost  [2]bool // by direction: something was swallowed, so what would follow has no meaning
}

type direction int

const (
	request direction = iota
	answer
)

func (m mode) swallows(d direction) bool {
	return m.fault == drop || m.fault == blackHole || m.fault == swallowAnswers && d == answer
}

// join makes conn an end of the link. It closes conn and says no when the link is gone, or the proxy drops all.
func (l *link) join(conn net.Conn) bool {
	l.proxy.mu.Lock()
	defer l.proxy.mu.Unlock()
	l.ends = append(l.ends, conn)
	if l.gone || l.proxy.mode.fault == drop {
		l.reset()
		return false
	}
	l.proxy.links[l] = struct{}{}
	return true
}

// pump moves what src sends to dst, its end included. It returns at the end of src.
func (l *link) pump(src, dst net.Conn, d direction) {
	buffer := make([]byte, 64<<10)
	for {
		n, err := src.Read(buffer)
		admitted := l.admit(d)
		if admitted {
			// When dst has gone, the pump that reads from it tells src, or not, as the mode then wants it.
			_, _ = dst.Write(buffer[:n])
		}
		if err != nil {
			if admitted {
				l.close()
			}
			return
		}
	}
}

// discard reads from src until its end.
func (l *link) discard(src net.Conn) {
	_, _ = io.Copy(io.Discard, src)
}

// admit decides, when the mode allows to decide, whether what came in this direction goes on.
func (l *link) admit(d direction) bool {
	came := time.Now()
	for {
		l.proxy.mu.Lock()
		mode, changed := l.proxy.mode, l.proxy.changed
		if l.lost[d] || mode.swallows(d) {
			l.lost[d] = true
			l.proxy.mu.Unlock()
			return false
		}
		l.proxy.mu.Unlock()
		switch mode.fault {
		case delay:
			due := time.NewTimer(time.Until(came.Add(mode.delay)))
			select {
			case <-due.C:
				return true
			case <-changed:
				due.Stop()
			}
		case hold:
			<-changed
		default:
			return true
		}
	}
}

func (l *link) close() {
	l.proxy.mu.Lock()
	defer l.proxy.mu.Unlock()
	l.end()
}

// reset ends the link with RST, so that both sides know at once that data was lost. The caller holds the mutex.
func (l *link) reset() {
	for _, conn := range l.ends {
		if tcp, ok := conn.(*net.TCPConn); ok {
			_ = tcp.SetLinger(0)
		}
	}
	l.end()
}

// end closes both ends. The caller holds the mutex.
func (l *link) end() {
	l.gone = true
	delete(l.proxy.links, l)
	for _, conn := range l.ends {
		_ = conn.Close()
	}
}
