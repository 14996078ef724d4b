// SPDX-License-Identifier: Apache-2.0

package testenv

import (
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
	"sync"
)

// Ports are drawn from below the range that Linux (from 32768) and others (from 49152) give to outgoing connections:
// while a killed server is down, no connection of someone's can sit on its port, not even the retry of its client.
const firstPort, lastPort = 16384, 32767

var ports = struct {
	sync.Mutex

	given map[int]bool
}{given: map[int]bool{}}

// FreePort returns a TCP port of 127.0.0.1 on which nobody listens, and which this process gets only once. Another
// process may still take it before it is used; Start then tries again with others.
func FreePort() (int, error) {
	ports.Lock()
	defer ports.Unlock()
	for range 200 {
		port := firstPort + rand.IntN(lastPort-firstPort+1)
		if ports.given[port] {
			continue
		}
		listener, err := net.Listen("tcp", loopback(port))
		if err != nil {
			continue
		}
		ports.given[port] = true
		return port, listener.Close()
	}
	return 0, fmt.Errorf("find a free port: 200 tries between %d and %d were all taken", firstPort, lastPort)
}

func loopback(port int) string {
	return net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
}
