package nacos

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"log/slog"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	grpcapi "github.com/nacos-group/nacos-sdk-go/v2/api/grpc"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/isthmus-mesh/isthmus/plugin"
)

// fake is a server of 2.x with one service, web of G in public. A request that it does not know fails the test.
type fake struct {
	grpcapi.UnimplementedRequestServer
	grpcapi.UnimplementedBiRequestStreamServer
	t    *testing.T
	addr string

	mu         sync.Mutex // guards everything below
	ip         string     // of web's instance
	refuse     bool       // answer that the server is not ready, so often
	asked      []string
	acks       []string
	toSend     chan *grpcapi.Payload
	mute       bool // answer no health check
	subscribed chan struct{}
}

func startFake(t *testing.T, ip string, opts ...grpc.ServerOption) *fake {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	f := &fake{t: t, addr: l.Addr().String(), ip: ip, toSend: make(chan *grpcapi.Payload, 10), subscribed: make(chan struct{}, 100)}
	s := grpc.NewServer(opts...)
	grpcapi.RegisterRequestServer(s, f)
	grpcapi.RegisterBiRequestStreamServer(s, f)
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = s.Serve(l)
	}()
	t.Cleanup(func() { s.Stop(); <-served })
	return f
}

func (f *fake) Request(ctx context.Context, p *grpcapi.Payload) (*grpcapi.Payload, error) {
	typ := p.GetMetadata().GetType()
	f.mu.Lock()
	f.asked = append(f.asked, typ)
	ip, mute, refuse := f.ip, f.mute, f.refuse
	f.refuse = false
	f.mu.Unlock()
	var r struct{ Namespace, GroupName, ServiceName string }
	_ = json.Unmarshal(p.GetBody().GetValue(), &r)
	ok := map[string]any{"resultCode": 200}
	switch typ {
	case "ServerCheckRequest":
		if refuse {
			ok = map[string]any{"resultCode": 500, "errorCode": 300, "message": "server is starting"}
		}
	case "HealthCheckRequest":
		if mute {
			<-ctx.Done()
			return nil, ctx.Err()
		}
	case "ServiceListRequest":
		if r.Namespace == publicNamespace {
			ok["count"], ok["serviceNames"] = 1, []string{"web"}
		}
	case "SubscribeServiceRequest", "ServiceQueryRequest":
		ok["serviceInfo"] = info(1, serviceID{r.Namespace, r.GroupName, r.ServiceName}, ip)
		f.subscribed <- struct{}{}
	default:
		f.t.Errorf("unknown request %s", typ)
	}
	body, err := json.Marshal(ok)
	return &grpcapi.Payload{Metadata: &grpcapi.Metadata{Type: "X"}, Body: &anypb.Any{Value: body}}, err
}

func (f *fake) RequestBiStream(s grpc.BidiStreamingServer[grpcapi.Payload, grpcapi.Payload]) error {
	received := make(chan struct{})
	go func() {
		defer close(received)
		for {
			p, err := s.Recv()
			if err != nil {
				return
			}
			f.mu.Lock()
			f.acks = append(f.acks, p.GetMetadata().GetType()+" "+string(p.GetBody().GetValue()))
			f.mu.Unlock()
		}
	}()
	for {
		select {
		case p := <-f.toSend:
			if err := s.Send(p); err != nil {
				return err
			}
		case <-received:
			return nil
		}
	}
}

func (f *fake) send(typ, body string) {
	f.toSend <- &grpcapi.Payload{Metadata: &grpcapi.Metadata{Type: typ}, Body: &anypb.Any{Value: []byte(body)}}
}

// config makes an adapter use the fakes. All of them have one port for HTTP, on which nothing listens.
func fakeConfig(fakes ...*fake) Config {
	c := DefaultConfig
	c.Protocol, c.Groups, c.Servers, c.GRPCPortOffset = protocolGRPC, []string{"G"}, nil, 1
	for _, f := range fakes {
		host, port, _ := net.SplitHostPort(f.addr)
		n, _ := strconv.Atoi(port)
		c.Servers = append(c.Servers, net.JoinHostPort(host, strconv.Itoa(n-1)))
	}
	return c
}

// runFake runs an adapter for the rest of the test.
func runFake(t *testing.T, c Config) *book {
	t.Helper()
	a, err := newAdapter(c, plugin.Env{Registry: "test"})
	if err != nil {
		t.Fatal(err)
	}
	b := &book{services: map[string]string{}, problems: map[string]string{}}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); _ = a.Run(ctx, b) }()
	t.Cleanup(func() { cancel(); <-done })
	return b
}

// eventually waits until cond, which runs under the book's mu, holds.
func (b *book) eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	tick, late := time.NewTicker(5*time.Millisecond), time.NewTimer(30*time.Second)
	defer tick.Stop()
	defer late.Stop()
	for {
		b.mu.Lock()
		ok := cond()
		b.mu.Unlock()
		if ok {
			return
		}
		select {
		case <-tick.C:
		case <-late.C:
			t.Fatalf("%s: not in time; services %v, degraded %q", what, b.services, b.degraded)
		}
	}
}

// TestSentAway shows that a reset with a recommendation is answered and followed to another server, that nothing is removed by it, and that the registry is
// not degraded.
func TestSentAway(t *testing.T) {
	one, two := startFake(t, "10.0.0.1"), startFake(t, "10.0.0.1")
	one.refuse = true // not ready at first
	b := runFake(t, fakeConfig(one, two))
	b.eventually(t, "the first server", func() bool { return b.services["public/G/web"] == "10.0.0.1:80" && b.synced })
	two.mu.Lock()
	two.ip = "10.0.0.1 10.0.0.2"
	two.mu.Unlock()
	host, port, _ := net.SplitHostPort(fakeConfig(two).Servers[0])
	one.send(typeConnectReset, `{"requestId":"7","serverIp":"`+host+`","serverPort":"`+port+`"}`)
	b.eventually(t, "the second server", func() bool { return b.services["public/G/web"] == "10.0.0.1:80 10.0.0.2:80" })
	b.wantState(t, "moved", "")
	one.mu.Lock()
	defer one.mu.Unlock()
	if !slices.ContainsFunc(one.acks, func(a string) bool {
		return strings.HasPrefix(a, "ConnectResetResponse ") && strings.Contains(a, `"requestId":"7"`)
	}) {
		t.Errorf("the reset was not answered: %q", one.acks)
	}
}

// TestUnknownRequest shows that what this client does not know is answered all the same.
func TestUnknownRequest(t *testing.T) {
	f := startFake(t, "10.0.0.1")
	b := runFake(t, fakeConfig(f))
	b.eventually(t, "synced", func() bool { return b.synced })
	f.send("SomethingNewRequest", `{"requestId":"8"}`)
	f.send("ClientDetectionRequest", `{"requestId":"9"}`)
	b.eventually(t, "both answered", func() bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		n := 0
		for _, a := range f.acks {
			if strings.HasPrefix(a, "SomethingNewResponse ") || strings.HasPrefix(a, "ClientDetectionResponse ") {
				n++
			}
		}
		return n == 2
	})
}

// TestMute shows that a server that does not answer any more is left for another one.
func TestMute(t *testing.T) {
	one, two := startFake(t, "10.0.0.1"), startFake(t, "10.0.0.1 10.0.0.2")
	b := runFake(t, fakeConfig(one, two))
	b.eventually(t, "the first server", func() bool { return b.services["public/G/web"] == "10.0.0.1:80" })
	one.mu.Lock()
	one.mute = true
	one.mu.Unlock()
	b.eventually(t, "the second server", func() bool { return b.services["public/G/web"] == "10.0.0.1:80 10.0.0.2:80" })
}

// TestTLS shows TLS with an authority and a client certificate of one's own, and what happens without.
func TestTLS(t *testing.T) {
	dir := t.TempDir()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "nacos"}, NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
		DNSNames: []string{"nacos.example.org"}, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	write := func(name, typ string, b []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: typ, Bytes: b}), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	cert, keyFile := write("cert.pem", "CERTIFICATE", der), write("key.pem", "PRIVATE KEY", keyDER)
	pool := x509.NewCertPool()
	parsed, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	pool.AddCert(parsed)
	f := startFake(t, "10.0.0.1", grpc.Creds(credentials.NewTLS(&tls.Config{
		Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: pool,
	})))
	s, err := parseServer(fakeConfig(f).Servers[0], "/nacos", 1)
	if err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		config TLSConfig
		want   string // part of the error
	}{
		"all of it":            {TLSConfig{CAFile: cert, CertFile: cert, KeyFile: keyFile, ServerName: "nacos.example.org"}, ""},
		"another name":         {TLSConfig{CAFile: cert, CertFile: cert, KeyFile: keyFile, ServerName: "other.example.org"}, "other.example.org"},
		"an unknown authority": {TLSConfig{CertFile: cert, KeyFile: keyFile, ServerName: "nacos.example.org"}, "unknown authority"},
		// With TLS 1.3 the server's alert comes after the handshake, and a write may fail before it is read: the reason is not
		// always told.
		"no client certificate": {TLSConfig{CAFile: cert, ServerName: "nacos.example.org"}, "ServerCheckRequest"},
		"not verified":          {TLSConfig{CertFile: cert, KeyFile: keyFile, InsecureSkipVerify: true}, ""},
	} {
		tlsConfig, err := newTLS(test.config)
		if err != nil {
			t.Fatal(err)
		}
		c, err := dial(t.Context(), s, tlsConfig, newAuth(Config{}, nil, nil), slog.New(slog.DiscardHandler))
		if err == nil {
			c.close()
		}
		if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: error %v, want %q", name, err, test.want)
		}
	}
	for field, bad := range map[string]TLSConfig{"tls.ca_file": {CAFile: keyFile}, "tls.cert_file": {CertFile: cert, KeyFile: cert}} {
		if _, err := newTLS(bad); err == nil || !strings.Contains(err.Error(), field) {
			t.Errorf("%s: error %v", field, err)
		}
	}
}
