package kubernetes

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

const (
	// requestTime bounds one request.
	requestTime = 15 * time.Second
	// maxAnswer bounds one answer, in bytes.
	maxAnswer = 64 << 20
	// podNamespace is the file in which a pod finds its namespace.
	podNamespace = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"
)

// kind is a kind of objects.
type kind struct {
	name string // as objects have it
	schema.GroupVersionResource
}

var (
	serviceEntries  = kind{"ServiceEntry", schema.GroupVersionResource{Group: "networking.istio.io", Version: "v1", Resource: "serviceentries"}}
	services        = kind{"Service", schema.GroupVersionResource{Version: "v1", Resource: "services"}}
	endpointSlices  = kind{"EndpointSlice", schema.GroupVersionResource{Group: "discovery.k8s.io", Version: "v1", Resource: "endpointslices"}}
	workloadEntries = kind{"WorkloadEntry", schema.GroupVersionResource{Group: "networking.istio.io", Version: "v1", Resource: "workloadentries"}}

	// allKinds are those that consumers write.
	allKinds = []kind{serviceEntries, services, endpointSlices, workloadEntries}

	pods   = schema.GroupVersionResource{Version: "v1", Resource: "pods"}
	leases = schema.GroupVersionResource{Group: "coordination.k8s.io", Version: "v1", Resource: "leases"}
)

// new returns an object of the kind.
func (k kind) new(namespace, name string) *unstructured.Unstructured {
	o := &unstructured.Unstructured{Object: map[string]any{"apiVersion": k.GroupVersion().String(), "kind": k.name}}
	o.SetNamespace(namespace)
	o.SetName(name)
	return o
}

// connect returns a client for the current context of a kubeconfig, "" for the
// cluster of the pod, and the namespace that either names. There is no request
// yet.
func connect(kubeconfig string) (client dynamic.Interface, closeIdle func(), namespace string, err error) {
	var c *rest.Config
	if kubeconfig == "" {
		if c, err = rest.InClusterConfig(); err != nil {
			return nil, nil, "", fmt.Errorf("is missing, and the bridge is in no pod of Kubernetes: %w", err)
		}
		text, err := os.ReadFile(podNamespace)
		if err != nil {
			return nil, nil, "", err
		}
		namespace = strings.TrimSpace(string(text))
	} else {
		if _, err := os.Stat(kubeconfig); err != nil {
			return nil, nil, "", err
		}
		all, err := clientcmd.LoadFromFile(kubeconfig)
		if err == nil {
			err = clientcmd.ResolveLocalPaths(all)
		}
		if err != nil {
			// The error may repeat a part of the file, which holds secrets.
			return nil, nil, "", fmt.Errorf("%s is no kubeconfig", kubeconfig)
		}
		of := clientcmd.NewNonInteractiveClientConfig(*all, all.CurrentContext, &clientcmd.ConfigOverrides{}, nil)
		if c, err = of.ClientConfig(); err != nil {
			return nil, nil, "", fmt.Errorf("%s: its current-context names no cluster and user that can be used: %w", kubeconfig, err)
		}
		if namespace, _, err = of.Namespace(); err != nil {
			return nil, nil, "", fmt.Errorf("%s names no namespace", kubeconfig)
		}
	}
	switch {
	case c.ExecProvider != nil || c.AuthProvider != nil || c.Username != "" || c.Impersonate.UserName != "" || c.Proxy != nil:
		return nil, nil, "", errors.New("exec, auth-provider, username, as and proxy-url are not supported; use a token, tokenFile or client-certificate")
	case !strings.HasPrefix(c.Host, "https://"):
		return nil, nil, "", errors.New("the server of the cluster must be https://HOST")
	case c.Insecure:
		return nil, nil, "", errors.New("insecure-skip-tls-verify would give tokens to anyone who answers; name the certificate-authority")
	}
	c.UserAgent, c.QPS, c.Timeout, c.WarningHandler = "isthmus", -1, requestTime, rest.NoWarnings{}
	c.Wrap(func(next http.RoundTripper) http.RoundTripper { return bounded{next} })
	h, err := rest.HTTPClientFor(c)
	if err != nil {
		return nil, nil, "", err
	}
	// A redirect would carry the token elsewhere.
	h.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	client, err = dynamic.NewForConfigAndClient(c, h)
	return client, func() { utilnet.CloseIdleConnectionsFor(h.Transport) }, namespace, err
}

// bounded bounds the size of answers.
type bounded struct{ http.RoundTripper }

// WrappedRoundTripper implements net.RoundTripperWrapper of package
// apimachinery.
func (b bounded) WrappedRoundTripper() http.RoundTripper { return b.RoundTripper }

// RoundTrip implements http.RoundTripper.
func (b bounded) RoundTrip(req *http.Request) (*http.Response, error) {
	res, err := b.RoundTripper.RoundTrip(req)
	if err == nil {
		res.Body = http.MaxBytesReader(nil, res.Body, maxAnswer)
	}
	return res, err
}
