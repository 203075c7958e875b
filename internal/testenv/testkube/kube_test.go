package testkube

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
)

func TestKube(t *testing.T) {
	testenv.SkipIfShort(t)
	k := Start(t, Config{Istio: true, Controllers: true})
	status := func(want int, method, path, token string, body any) string {
		t.Helper()
		answer, code, err := k.Do(t.Context(), method, path, token, "", body)
		if err != nil || code != want {
			t.Fatalf("%s %s: status %d, error %v, want %d: %s", method, path, code, err, want, answer)
		}
		return string(answer)
	}
	const services = "/api/v1/namespaces/default/services"
	token := k.ServiceAccount(t, "bridge", "reader")
	status(http.StatusForbidden, http.MethodGet, services, token, nil)
	status(http.StatusUnauthorized, http.MethodGet, services, "unknown", nil)
	k.Apply(t, `
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: reader}
rules: [{apiGroups: [""], resources: [services], verbs: [list]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: reader}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: reader}
subjects: [{kind: ServiceAccount, namespace: bridge, name: reader}, {apiGroup: rbac.authorization.k8s.io, kind: Group, name: readers}]
`)
	// The server's own view of roles follows a moment later.
	testenv.Eventually(t, testenv.Patience, "the role of the service account", func() (string, bool) {
		answer, code, err := k.Do(t.Context(), http.MethodGet, services, token, "", nil)
		return fmt.Sprintf("status %d, error %v: %.200s", code, err, answer), code == http.StatusOK
	})
	review := status(http.StatusCreated, http.MethodPost, "/apis/authentication.k8s.io/v1/tokenreviews", "",
		map[string]any{"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": map[string]any{"token": token}})
	if !strings.Contains(review, `"username":"system:serviceaccount:bridge:reader"`) {
		t.Errorf("review of a service account's token: %s", review)
	}
	someone := k.ClientCertificate(t, "someone", "readers")
	pair, err := tls.LoadX509KeyPair(someone.Cert, someone.Key)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(k.server.Leaf())
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool, Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12}}}
	defer client.CloseIdleConnections()
	if body, code, err := testenv.Do(t.Context(), client, http.MethodGet, k.URL+services, nil, nil); err != nil || code != http.StatusOK {
		t.Errorf("with a certificate: status %d, error %v: %s", code, err, body)
	}

	// The controller wants the pod's node.
	k.Apply(t, `
apiVersion: v1
kind: Node
metadata: {name: n1}
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec: {selector: {app: web}, ports: [{name: http, port: 80, targetPort: 8080}]}
---
apiVersion: v1
kind: Pod
metadata: {name: web-1, labels: {app: web}}
spec: {nodeName: n1, containers: [{name: web, image: web}]}
`)
	k.ApplyStatus(t, `
apiVersion: v1
kind: Pod
metadata: {name: web-1}
status: {phase: Running, podIP: 10.1.0.1, podIPs: [{ip: 10.1.0.1}], conditions: [{type: Ready, status: "True"}]}
`)
	const slices = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices?labelSelector=kubernetes.io/service-name=web"
	endpoint := func() {
		t.Helper()
		testenv.Eventually(t, testenv.Patience, "the endpoint of web", func() (string, bool) {
			answer, _, err := k.Do(t.Context(), http.MethodGet, slices, "", "", nil)
			return fmt.Sprint(string(answer), err), strings.Contains(string(answer), "10.1.0.1")
		})
	}
	endpoint()
	const entries = "/apis/networking.istio.io/v1/namespaces/default/serviceentries"
	refused := status(http.StatusUnprocessableEntity, http.MethodPost, entries, "", `{"apiVersion": "networking.istio.io/v1", "kind": "ServiceEntry", "metadata": {"name": "none"}, "spec": {"hosts": []}}`)
	if !strings.Contains(refused, "spec.hosts") {
		t.Errorf("an entry without a host: %s", refused)
	}

	k.Kill()
	if _, _, err := k.Do(t.Context(), http.MethodGet, services, "", "", nil); err == nil {
		t.Error("the killed server answers")
	}
	k.Restart(t)
	endpoint()
	k.Kill()
	k.RestartEmpty(t)
	status(http.StatusNotFound, http.MethodGet, services+"/web", "", nil)
}
