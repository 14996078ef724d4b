// SPDX-License-Identifier: Apache-2.0

package testenv

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"time"
)

// Check asks whether something works: nil is yes, an error says why not. It ends with its context.
type Check func(ctx context.Context) error

// HTTPOK is a Check that GETs url and wants status 200. Each call makes a connection of its own, so that it says
// something about the server as it is now. tlsConfig may be nil.
func HTTPOK(url string, tlsConfig *tls.Config) Check {
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: tlsConfig, DisableKeepAlives: true}}
	return func(ctx context.Context) error {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
		if err != nil {
			return err
		}
		resp, err := client.Do(req)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			body, _ := io.ReadAll(io.LimitReader(resp.Body, 2048))
			return fmt.Errorf("get %s: %s: %s", url, resp.Status, body)
		}
		return nil
	}
}

func (c Check) within(ctx context.Context, d time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	return c(ctx)
}
