// SPDX-License-Identifier: Apache-2.0

package fence

import (
	"encoding/base64"
	"encoding/json"
	"net"
	"os"
	"path/filepath"
	"strings"

	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
)

const (
	serviceAccountDir = "/var/run/secrets/kubernetes.io/serviceaccount"
	podNameExtra      = "authentication.kubernetes.io/pod-name"
)

// pod is the Pod that a process runs in; zero outside Pods.
type pod struct {
	namespace, name string
	uid             types.UID
}

// inPod reads what is known inside a Pod: the downward API's POD_NAME and POD_UID, else the claims of the
// mounted service-account token.
func inPod() pod { return podFrom(os.Getenv, serviceAccountDir) }

func podFrom(getenv func(string) string, dir string) pod {
	claims := readClaims(filepath.Join(dir, "token"))
	namespace, _ := os.ReadFile(filepath.Join(dir, "namespace"))
	p := pod{namespace: strings.TrimSpace(string(namespace)), name: claims.Pod.Name, uid: claims.Pod.UID}
	if p.namespace == "" {
		p.namespace = claims.Namespace
	}
	if ns := getenv("POD_NAMESPACE"); ns != "" {
		p.namespace = ns
	}
	if name, uid := getenv("POD_NAME"), getenv("POD_UID"); name != "" && uid != "" {
		p.name, p.uid = name, types.UID(uid)
	}
	return p
}

// claims are what a service-account token says of its Pod. It is not verified here: whoever could forge the file
// is in the Pod.
type claims struct {
	Namespace string `json:"namespace"`
	Pod       struct {
		Name string    `json:"name"`
		UID  types.UID `json:"uid"`
	} `json:"pod"`
}

func readClaims(path string) claims {
	token, err := os.ReadFile(path)
	if err != nil {
		return claims{}
	}
	parts := strings.Split(strings.TrimSpace(string(token)), ".")
	if len(parts) != 3 {
		return claims{}
	}
	payload, err := base64.RawURLEncoding.DecodeString(parts[1])
	if err != nil {
		return claims{}
	}
	var all struct {
		Kubernetes claims `json:"kubernetes.io"`
	}
	if json.Unmarshal(payload, &all) != nil {
		return claims{}
	}
	return all.Kubernetes
}

// podOf is the Pod that the session belongs to. What the API server read in the credentials is the truth. With
// other credentials it is the Pod that the process finds itself in, unless those lead to another cluster, where the
// garbage collector would not find the Pod and delete the session.
func podOf(user authenticationv1.UserInfo, here pod, cfg *rest.Config, getenv func(string) string) pod {
	if uid := extra(user, v1alpha1.PodUIDExtra); uid != "" {
		p := pod{name: extra(user, podNameExtra), uid: types.UID(uid)}
		if account, ok := strings.CutPrefix(user.Username, "system:serviceaccount:"); ok {
			p.namespace, _, _ = strings.Cut(account, ":") // a token is bound to a Pod of its own namespace
		}
		return p
	}
	host, port := getenv("KUBERNETES_SERVICE_HOST"), getenv("KUBERNETES_SERVICE_PORT")
	if host != "" && cfg.Host != "https://"+net.JoinHostPort(host, port) {
		return pod{}
	}
	return here
}

func extra(user authenticationv1.UserInfo, key string) string {
	if values := user.Extra[key]; len(values) > 0 {
		return values[0]
	}
	return ""
}

// owners makes the Pod the session's owner, so that the session goes with it. An owner in another namespace does
// not exist for the garbage collector: it would delete the session at once.
func (p pod) owners(namespace string) []metav1.OwnerReference {
	elsewhere := p.namespace != "" && p.namespace != namespace
	if p.name == "" || p.uid == "" || elsewhere {
		return nil
	}
	return []metav1.OwnerReference{{APIVersion: "v1", Kind: "Pod", Name: p.name, UID: p.uid}}
}
