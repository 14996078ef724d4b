// SPDX-License-Identifier: Apache-2.0

package testenv

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// applyTimeout bounds an Apply whose context has no deadline.
const applyTimeout = time.Minute

// Kubectl runs bin/kubectl as the admin and returns what it prints; an error carries what it says on stderr. A
// --kubeconfig among args takes another user (see WriteKubeconfig). Plugins in bin/ are found.
func (e *Env) Kubectl(ctx context.Context, args ...string) (string, error) {
	// For the sake of tied.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()

	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, filepath.Join(e.binaries, "kubectl"), args...)
	cmd.Env = append(os.Environ(),
		"KUBECONFIG="+e.Kubeconfig(),
		"KUBECACHEDIR="+filepath.Join(e.dir, "kubectl-cache"),
		"KUBERC=off", // the user's own aliases and defaults
		"PATH="+e.binaries+string(os.PathListSeparator)+os.Getenv("PATH"),
	)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	cmd.SysProcAttr = tied()
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return stdout.String(), fmt.Errorf("kubectl %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return stdout.String(), nil
}

// Apply applies the kustomization in dir, server-side and with force. When it holds custom resources beside their
// definitions, it tries again until these are served, for a minute at most.
func (e *Env) Apply(ctx context.Context, dir string) error {
	var last error
	err := wait.PollUntilContextTimeout(ctx, 4*pollInterval, applyTimeout, true, func(ctx context.Context) (bool, error) {
		_, last = e.Kubectl(ctx, "apply", "--server-side", "--force-conflicts", "-k", dir)
		if last != nil && !notServedYet(last) {
			return false, last
		}
		return last == nil, nil
	})
	if wait.Interrupted(err) {
		return errors.Join(err, last)
	}
	return err
}

// notServedYet recognises what kubectl says of a kind whose definition is not established: the words for no such
// resource in discovery, and for one that is listed there and not served.
func notServedYet(err error) bool {
	return strings.Contains(err.Error(), "no matches for kind") ||
		strings.Contains(err.Error(), "the server could not find the requested resource")
}

// WriteKubeconfig writes cfg as a kubeconfig to path, for programs that are to act as its user: by certificate, token
// or impersonation.
func WriteKubeconfig(cfg *rest.Config, path string) error {
	const name = "testenv"
	kubeconfig := clientcmdapi.NewConfig()
	kubeconfig.CurrentContext = name
	kubeconfig.Contexts[name] = &clientcmdapi.Context{Cluster: name, AuthInfo: name}
	kubeconfig.Clusters[name] = &clientcmdapi.Cluster{
		Server:                   cfg.Host,
		CertificateAuthority:     cfg.CAFile,
		CertificateAuthorityData: cfg.CAData,
		TLSServerName:            cfg.ServerName,
		InsecureSkipTLSVerify:    cfg.Insecure,
	}
	kubeconfig.AuthInfos[name] = &clientcmdapi.AuthInfo{
		ClientCertificate:     cfg.CertFile,
		ClientCertificateData: cfg.CertData,
		ClientKey:             cfg.KeyFile,
		ClientKeyData:         cfg.KeyData,
		Token:                 cfg.BearerToken,
		TokenFile:             cfg.BearerTokenFile,
		Username:              cfg.Username,
		Password:              cfg.Password,
		Impersonate:           cfg.Impersonate.UserName,
		ImpersonateUID:        cfg.Impersonate.UID,
		ImpersonateGroups:     cfg.Impersonate.Groups,
		ImpersonateUserExtra:  cfg.Impersonate.Extra,
	}
	if err := clientcmd.WriteToFile(*kubeconfig, path); err != nil {
		return fmt.Errorf("write kubeconfig %q: %w", path, err)
	}
	return nil
}
