// SPDX-License-Identifier: Apache-2.0

package testenv

import (
	"crypto/tls"
	"path/filepath"
	"strconv"

	"k8s.io/client-go/rest"
)

// plane is the configuration of one control plane: its ports, its certificates, and the flags that follow.
type plane struct {
	*Env

	admin *rest.Config

	etcdPort, apiPort, controllerPort int
	certificates                      certificates
	tlsConfig                         *tls.Config // of the admin
}

func newPlane(e *Env, options Options) (*plane, error) {
	p := &plane{Env: e}
	for _, port := range []*int{&p.etcdPort, &p.apiPort, &p.controllerPort} {
		var err error
		if *port, err = FreePort(); err != nil {
			return nil, err
		}
	}
	var err error
	if p.certificates, err = writeCertificates(filepath.Join(e.dir, "certs")); err != nil {
		return nil, err
	}
	p.admin = p.configFor(p.certificates.admin)
	if p.tlsConfig, err = rest.TLSConfigFor(p.admin); err != nil {
		return nil, err
	}
	if options.ControllerManager {
		err = WriteKubeconfig(p.configFor(p.certificates.controllerManager), p.controllerKubeconfig())
	}
	return p, err
}

func (p *plane) etcd() *Process {
	url := "http://" + loopback(p.etcdPort)
	return p.process("etcd", HTTPOK(url+"/readyz", nil),
		"--data-dir="+filepath.Join(p.dir, "etcd"),
		"--listen-client-urls="+url,
		"--advertise-client-urls="+url,
		"--listen-peer-urls=http://"+loopback(0), // one member: nobody calls
		"--unsafe-no-fsync",                      // survives kill -9 of etcd, not a crash of the machine
		"--log-level=warn",
	)
}

func (p *plane) apiServer(extra []string) *Process {
	flags := []string{
		"--etcd-servers=http://" + loopback(p.etcdPort),
		"--bind-address=127.0.0.1",
		"--advertise-address=127.0.0.1", // otherwise it looks for a default route, which a sandbox may lack
		"--secure-port=" + strconv.Itoa(p.apiPort),
		"--endpoint-reconciler-type=none", // endpoints on loopback are refused, and nobody uses them
		"--service-cluster-ip-range=10.0.0.0/24",
		"--authorization-mode=Node,RBAC",
		"--enable-admission-plugins=NodeRestriction", // what kubeadm adds to the default set
		"--allow-privileged=true",
		"--shutdown-watch-termination-grace-period=2s", // otherwise a graceful end waits a minute for open watches
		"--cert-dir=" + p.certificates.dir,
		"--client-ca-file=" + p.certificates.caFile,
		"--tls-cert-file=" + p.certificates.serving.certFile,
		"--tls-private-key-file=" + p.certificates.serving.keyFile,
		"--service-account-issuer=https://kubernetes.default.svc.cluster.local",
		"--service-account-key-file=" + p.certificates.serviceAccountKeyFile,
		"--service-account-signing-key-file=" + p.certificates.serviceAccountKeyFile,
		"--profiling=false",
	}
	return p.process("kube-apiserver", HTTPOK(p.admin.Host+"/readyz", p.tlsConfig), append(flags, extra...)...)
}

func (p *plane) controllerManager() *Process {
	return p.process("kube-controller-manager", HTTPOK("https://"+loopback(p.controllerPort)+"/healthz", p.tlsConfig),
		"--kubeconfig="+p.controllerKubeconfig(),
		"--bind-address=127.0.0.1",
		"--secure-port="+strconv.Itoa(p.controllerPort),
		"--tls-cert-file="+p.certificates.serving.certFile,
		"--tls-private-key-file="+p.certificates.serving.keyFile,
		"--use-service-account-credentials", // each controller as itself, as policies know them
		"--service-account-private-key-file="+p.certificates.serviceAccountKeyFile,
		"--root-ca-file="+p.certificates.caFile,
		"--kube-api-qps=500", // each controller makes an account and a token for itself: 3 s at the default of 20
		"--kube-api-burst=1000",
		"--leader-elect=false",
		"--profiling=false",
	)
}

func (p *plane) process(name string, ready Check, args ...string) *Process {
	return &Process{
		Name:    name,
		Path:    filepath.Join(p.binaries, name),
		Args:    args,
		LogPath: filepath.Join(p.LogDir(), name+".log"),
		Ready:   ready,
	}
}

// configFor returns the configuration of the client that has this certificate.
func (p *plane) configFor(client keyPair) *rest.Config {
	return &rest.Config{
		Host: "https://" + loopback(p.apiPort),
		TLSClientConfig: rest.TLSClientConfig{
			CAData:   p.certificates.ca,
			CertData: client.cert,
			KeyData:  client.key,
		},
		QPS: -1,
	}
}

func (p *plane) controllerKubeconfig() string {
	return filepath.Join(p.dir, "certs", "kube-controller-manager.kubeconfig")
}
