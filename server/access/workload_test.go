package access

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"math/big"
	"net"
	"net/url"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	workloadpb "github.com/spiffe/go-spiffe/v2/proto/spiffe/workload"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/isthmus-mesh/isthmus/internal/testwait"
	"github.com/isthmus-mesh/isthmus/server/config"
)

// authority signs the identities of a trust domain.
type authority struct {
	t    *testing.T
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t *testing.T, domain string) *authority {
	t.Helper()
	a := &authority{t: t}
	id := &url.URL{Scheme: "spiffe", Host: domain}
	a.cert, a.key = a.sign(&x509.Certificate{
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign, URIs: []*url.URL{id}, NotAfter: time.Now().Add(24 * time.Hour),
	})
	return a
}

func (a *authority) sign(c *x509.Certificate) (*x509.Certificate, *ecdsa.PrivateKey) {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	c.SerialNumber, c.NotBefore = big.NewInt(time.Now().UnixNano()), time.Now().Add(-time.Hour)
	parent, signer := a.cert, a.key
	if parent == nil {
		parent, signer = c, key
	}
	der, err := x509.CreateCertificate(rand.Reader, c, parent, &key.PublicKey, signer)
	if err != nil {
		a.t.Fatal(err)
	}
	out, err := x509.ParseCertificate(der)
	if err != nil {
		a.t.Fatal(err)
	}
	return out, key
}

// identity returns a certificate for a SPIFFE ID that lasts so long.
func (a *authority) identity(id string, lasts time.Duration) (*x509.Certificate, *ecdsa.PrivateKey) {
	a.t.Helper()
	u, err := url.Parse(id)
	if err != nil {
		a.t.Fatal(err)
	}
	return a.sign(&x509.Certificate{
		URIs: []*url.URL{u}, KeyUsage: x509.KeyUsageDigitalSignature, NotAfter: time.Now().Add(lasts),
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	})
}

// caller returns the credentials of a client with an identity.
func (a *authority) caller(id string) credentials.TransportCredentials {
	cert, key := a.identity(id, time.Hour)
	pair := tls.Certificate{Certificate: [][]byte{cert.Raw}, PrivateKey: key}
	return credentials.NewTLS(&tls.Config{
		InsecureSkipVerify:   true, //nolint:gosec // the certificate of the listener is compared by the test
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &pair, nil },
	})
}

// workloadAPI is a server of the SPIFFE Workload API, of the protocol's own
// package, whose answer the test sets.
type workloadAPI struct {
	workloadpb.UnimplementedSpiffeWorkloadAPIServer
	mu      sync.Mutex
	answer  *workloadpb.X509SVIDResponse
	refusal error
	changed chan struct{}
}

func (w *workloadAPI) set(answer *workloadpb.X509SVIDResponse, refusal error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.answer, w.refusal = answer, refusal
	close(w.changed)
	w.changed = make(chan struct{})
}

// FetchX509SVID implements the API.
func (w *workloadAPI) FetchX509SVID(_ *workloadpb.X509SVIDRequest, st grpc.ServerStreamingServer[workloadpb.X509SVIDResponse]) error {
	if md, _ := metadata.FromIncomingContext(st.Context()); strings.Join(md.Get("workload.spiffe.io"), "") != "true" {
		return status.Error(codes.InvalidArgument, "security header missing from request")
	}
	for {
		w.mu.Lock()
		answer, refusal, changed := w.answer, w.refusal, w.changed
		w.mu.Unlock()
		if refusal != nil {
			return refusal
		}
		if err := st.Send(answer); err != nil {
			return err
		}
		select {
		case <-changed:
		case <-st.Context().Done():
			return nil
		}
	}
}

func startWorkloadAPI(t *testing.T) (w *workloadAPI, address string, stop func()) {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "api.sock")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	w = &workloadAPI{changed: make(chan struct{})}
	s := grpc.NewServer()
	workloadpb.RegisterSpiffeWorkloadAPIServer(s, w)
	var all sync.WaitGroup
	all.Go(func() { _ = s.Serve(l) })
	stop = sync.OnceFunc(func() {
		s.Stop()
		all.Wait()
	})
	t.Cleanup(stop)
	return w, "unix://" + socket, stop
}

func svid(t *testing.T, a *authority, id string, lasts time.Duration, federated ...*authority) *workloadpb.X509SVIDResponse {
	t.Helper()
	cert, key := a.identity(id, lasts)
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	r := &workloadpb.X509SVIDResponse{
		Svids:            []*workloadpb.X509SVID{{SpiffeId: id, X509Svid: cert.Raw, X509SvidKey: der, Bundle: a.cert.Raw}},
		FederatedBundles: map[string][]byte{},
	}
	for _, f := range federated {
		r.FederatedBundles["spiffe://"+f.cert.URIs[0].Host] = f.cert.Raw
	}
	return r
}

// A listener has the certificate and the authorities of a Workload API, and
// follows their renewal without a dropped stream. The authority of one trust
// domain does not speak for another.
func TestWorkloadAPI(t *testing.T) {
	own, friend, stranger := newAuthority(t, "mesh.example.org"), newAuthority(t, "friend.example.org"), newAuthority(t, "mesh.example.org")
	api, address, stop := startWorkloadAPI(t)
	api.set(svid(t, own, "spiffe://mesh.example.org/isthmus", time.Hour, friend), nil)
	listener := config.Listener{
		TLS:   config.ListenerTLS{WorkloadAPI: address, ClientAuth: config.ClientAuthRequire},
		Allow: []config.Allow{{Peer: config.Peer{SPIFFE: "spiffe://*.example.org/istiod"}}},
	}
	g, _, log := newGate(t, listener)
	at := serve(t, g)

	mine, err := open(t, at, own.caller("spiffe://mesh.example.org/istiod"), "")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := open(t, at, friend.caller("spiffe://friend.example.org/istiod"), ""); err != nil {
		t.Errorf("a federated trust domain: %v", err)
	}
	if _, err := open(t, at, own.caller("spiffe://mesh.example.org/other"), ""); status.Code(err) != codes.PermissionDenied {
		t.Errorf("an identity without a rule: %v", err)
	}
	for name, creds := range map[string]credentials.TransportCredentials{
		"a federated authority for another trust domain": friend.caller("spiffe://mesh.example.org/istiod"),
		"an unknown authority":                           stranger.caller("spiffe://mesh.example.org/istiod"),
	} {
		before := refused(g, reasonHandshake)
		if _, err := open(t, at, creds, ""); err == nil {
			t.Errorf("%s is let in", name)
		}
		// In TLS 1.3 a client has finished before the server refuses it.
		testwait.Eventually(t, patience, name+" to be refused", func() (string, bool) { return "", refused(g, reasonHandshake) > before })
	}

	// Certificate and authorities are renewed.
	expires := func() time.Time {
		_, until := g.policy.Load().tls.valid()
		return until
	}
	before := expires()
	api.set(svid(t, own, "spiffe://mesh.example.org/isthmus", 2*time.Hour, newAuthority(t, "third.example.org")), nil)
	testwait.Eventually(t, patience, "the renewed certificate", func() (string, bool) { return expires().String(), expires().After(before) })
	if _, err := open(t, at, friend.caller("spiffe://friend.example.org/istiod"), ""); err == nil {
		t.Error("a trust domain that is no longer federated is let in")
	}
	if err := echo(mine); err != nil {
		t.Errorf("the open stream: %v", err)
	}

	// Without the API what it gave last stays in use, and the log says so.
	stop()
	testwait.Eventually(t, patience, "the loss of the API", func() (string, bool) { return "", g.policy.Load().tls.fault() != nil })
	if _, err := open(t, at, own.caller("spiffe://mesh.example.org/istiod"), ""); err != nil {
		t.Errorf("without the API: %v", err)
	}
	if !strings.Contains(log.String(), "those read before stay in use") || !strings.Contains(log.String(), address) {
		t.Errorf("the log: %s", log)
	}
}

// A Workload API that gives no identity is an error of the configuration.
func TestWorkloadAPIRefuses(t *testing.T) {
	api, address, _ := startWorkloadAPI(t)
	api.set(nil, status.Error(codes.InvalidArgument, "no identity for you"))
	_, err := New(config.Listener{TLS: config.ListenerTLS{WorkloadAPI: address}})
	if err == nil || !strings.Contains(err.Error(), "tls.workload_api") || !strings.Contains(err.Error(), "no identity for you") {
		t.Errorf("%v", err)
	}
}
