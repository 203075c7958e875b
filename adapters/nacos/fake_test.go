package nacos

import (
	"context"
	"encoding/json"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
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

	"github.com/isthmus-mesh/isthmus/internal/testcert"
	"github.com/isthmus-mesh/isthmus/internal/testwait"
	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/plugintest"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// fake is a server of 2.x with one service, web of G in public. A request that
// it does not know fails the test.
type fake struct {
	grpcapi.UnimplementedRequestServer
	grpcapi.UnimplementedBiRequestStreamServer
	t    *testing.T
	addr string

	mu sync.Mutex // guards everything below
	ip string     // of web's instance
	// hook gives other answers than the usual ones, where it returns one. It is
	// called without mu.
	hook       func(ctx context.Context, r fakeRequest) map[string]any
	refuse     bool // answer that the server is not ready, so often
	asked      []string
	acks       []string
	toSend     chan *grpcapi.Payload
	mute       bool // answer no health check
	clock      uint64
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

// fakeRequest is what the fake reads of a request.
type fakeRequest struct {
	Type, Namespace, GroupName, ServiceName string
	PageSize                                int
}

// answer replaces the answers to some requests.
func (f *fake) answer(hook func(ctx context.Context, r fakeRequest) map[string]any) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.hook = hook
}

// refusal is the answer to who may not ask.
func refusal() map[string]any {
	return map[string]any{"resultCode": 500, "errorCode": codeForbidden, "message": "authorization failed!"}
}

func (f *fake) Request(ctx context.Context, p *grpcapi.Payload) (*grpcapi.Payload, error) {
	typ := p.GetMetadata().GetType()
	f.mu.Lock()
	f.asked = append(f.asked, typ)
	ip, mute, refuse, hook := f.ip, f.mute, f.refuse, f.hook
	f.refuse = false
	f.mu.Unlock()
	r := fakeRequest{}
	_ = json.Unmarshal(p.GetBody().GetValue(), &r)
	r.Type = typ
	if hook != nil {
		if other := hook(ctx, r); other != nil {
			body, err := json.Marshal(other)
			return &grpcapi.Payload{Metadata: &grpcapi.Metadata{Type: "X"}, Body: &anypb.Any{Value: body}}, err
		}
	}
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
		ok["count"], ok["serviceNames"] = 0, []string{}
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

// push sends the instances of web.
func (f *fake) push(ips string) {
	f.mu.Lock()
	f.clock++
	i := info(f.clock, web, ips)
	f.mu.Unlock()
	body, err := json.Marshal(map[string]any{"requestId": "1", "serviceInfo": i})
	if err != nil {
		f.t.Error(err)
	}
	f.send(typePush, string(body))
}

func (f *fake) send(typ, body string) {
	f.toSend <- &grpcapi.Payload{Metadata: &grpcapi.Metadata{Type: typ}, Body: &anypb.Any{Value: []byte(body)}}
}

// config makes an adapter use the fakes. All of them have one port for HTTP, on
// which nothing listens.
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
	b := newBook()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); _ = a.Run(ctx, b) }()
	t.Cleanup(func() { cancel(); <-done })
	return b
}

// testClient returns a client of the HTTP API.
func testClient(t testing.TB) *plugin.HTTPClient {
	t.Helper()
	c, err := newHTTPClient(plugin.TLS{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// eventually waits until cond, which may read Held, holds.
func (b *book) eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	testwait.Eventually(t, 30*time.Second, what, func() (seen string, ok bool) {
		b.Look(func(h *plugintest.Held) { seen, ok = h.String(), cond() })
		return seen, ok
	})
}

// TestSentAway shows that a reset with a recommendation is answered and
// followed to another server, that nothing is removed by it, and that the
// registry is not degraded.
func TestSentAway(t *testing.T) {
	one, two := startFake(t, "10.0.0.1"), startFake(t, "10.0.0.1")
	one.refuse = true // not ready at first
	b := runFake(t, fakeConfig(one, two))
	b.eventually(t, "the first server", func() bool { return b.Held.IDs("public/G/web") == "10.0.0.1:80" && b.Held.Synced })
	two.mu.Lock()
	two.ip = "10.0.0.1 10.0.0.2"
	two.mu.Unlock()
	host, port, _ := net.SplitHostPort(fakeConfig(two).Servers[0])
	one.send(typeConnectReset, `{"requestId":"7","serverIp":"`+host+`","serverPort":"`+port+`"}`)
	b.eventually(t, "the second server", func() bool { return b.Held.IDs("public/G/web") == "10.0.0.1:80 10.0.0.2:80" })
	b.WantDegraded(t, "moved", "")
	one.mu.Lock()
	defer one.mu.Unlock()
	if !slices.ContainsFunc(one.acks, func(a string) bool {
		return strings.HasPrefix(a, "ConnectResetResponse ") && strings.Contains(a, `"requestId":"7"`)
	}) {
		t.Errorf("the reset was not answered: %q", one.acks)
	}
}

// TestHeard shows that the answers of a server and what it sends by itself are
// told as heard from it.
func TestHeard(t *testing.T) {
	f := startFake(t, "10.0.0.1")
	b := runFake(t, fakeConfig(f))
	b.eventually(t, "an answer", func() bool { return b.Held.Synced && b.Held.Heard > 0 })
	before := 0
	b.Look(func(h *plugintest.Held) { before = h.Heard })
	for range 20 { // more than there are requests under way
		f.send("ClientDetectionRequest", `{"requestId":"9"}`)
	}
	b.eventually(t, "messages", func() bool { return b.Held.Heard >= before+20 })
}

// TestUnknownRequest shows that what this client does not know is answered all
// the same.
func TestUnknownRequest(t *testing.T) {
	f := startFake(t, "10.0.0.1")
	b := runFake(t, fakeConfig(f))
	b.eventually(t, "synced", func() bool { return b.Held.Synced })
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

// TestMute shows that a server that does not answer any more is left for
// another one.
func TestMute(t *testing.T) {
	t.Parallel()
	one, two := startFake(t, "10.0.0.1"), startFake(t, "10.0.0.1 10.0.0.2")
	b := runFake(t, fakeConfig(one, two))
	b.eventually(t, "the first server", func() bool { return b.Held.IDs("public/G/web") == "10.0.0.1:80" })
	one.mu.Lock()
	one.mute = true
	one.mu.Unlock()
	b.eventually(t, "the second server", func() bool { return b.Held.IDs("public/G/web") == "10.0.0.1:80 10.0.0.2:80" })
}

// TestEmptyNamespaceIsAwaited shows that before 2.4 the first listing is not in
// before that of the empty namespace is, which is "public" as some clients
// write it.
func TestEmptyNamespaceIsAwaited(t *testing.T) {
	f := startFake(t, "10.0.0.1")
	release := make(chan struct{})
	f.answer(func(ctx context.Context, r fakeRequest) map[string]any {
		if r.Type != "ServiceListRequest" || r.Namespace != "" {
			return nil
		}
		select {
		case <-release:
		case <-ctx.Done():
		}
		return map[string]any{"resultCode": 200, "count": 1, "serviceNames": []string{"old"}}
	})
	b := runFake(t, fakeConfig(f))
	b.eventually(t, "the other list", func() bool { return b.Held.IDs("public/G/web") == "10.0.0.1:80" })
	f.push("10.0.0.2") // whatever followed from the answer is through when this is
	b.eventually(t, "a push", func() bool { return b.Held.IDs("public/G/web") == "10.0.0.2:80" && !b.Held.Synced })
	close(release)
	b.eventually(t, "both lists", func() bool { return b.Held.Synced && b.Held.IDs("public/G/old") == "10.0.0.1:80" })
	b.WantDegraded(t, "both lists", "")
}

// TestEmptyNamespaceRefused shows that a user who may not read the empty
// namespace is shown all else, and told; and that a user who may read nothing
// has no first listing.
func TestEmptyNamespaceRefused(t *testing.T) {
	f := startFake(t, "10.0.0.1")
	var mu sync.Mutex // guards refused
	refused := map[string]bool{"": true, publicNamespace: true}
	control := true // what is asked when the empty namespace was refused is refused too
	f.answer(func(_ context.Context, r fakeRequest) map[string]any {
		mu.Lock()
		defer mu.Unlock()
		switch {
		case r.Type != "ServiceListRequest":
			return nil
		case refused[r.Namespace], control && r.PageSize == 1:
			return refusal()
		case r.Namespace == "":
			return map[string]any{"resultCode": 200, "count": 1, "serviceNames": []string{"old"}}
		}
		return nil
	})
	c := fakeConfig(f)
	c.ListInterval = plugin.Duration(500 * time.Millisecond)
	b := runFake(t, c)
	b.eventually(t, "everything refused", func() bool {
		return strings.Contains(b.Held.Degraded, `namespace "public"`) && !b.Held.Synced && len(b.Held.Services) == 0
	})
	allow := func(namespace string) {
		mu.Lock()
		defer mu.Unlock()
		delete(refused, namespace)
	}
	allow(publicNamespace)
	b.eventually(t, "one of them refused, and the other from then on", func() bool { return len(b.Held.Instances["public/G/web"]) > 0 })
	lists := func() int {
		f.mu.Lock()
		defer f.mu.Unlock()
		n := 0
		for _, a := range f.asked {
			if a == "ServiceListRequest" {
				n++
			}
		}
		return n
	}
	before := lists()
	b.eventually(t, "asked again", func() bool {
		return lists() >= before+4 && !b.Held.Synced && !strings.Contains(b.Held.Degraded, `namespace ""`)
	})
	mu.Lock()
	control = false
	mu.Unlock()
	b.eventually(t, "one of them refused", func() bool {
		return b.Held.Synced && len(b.Held.Instances["public/G/web"]) > 0 && strings.Contains(b.Held.Degraded, `namespace ""`) && strings.Contains(b.Held.Degraded, `":*:*"`)
	})
	allow("")
	b.eventually(t, "none refused", func() bool { return b.Held.Degraded == "" && b.Held.IDs("public/G/old") == "10.0.0.1:80" })
}

// TestEmptyNamespaceFails shows that a list of the empty namespace that fails
// is a fault like that of any other.
func TestEmptyNamespaceFails(t *testing.T) {
	for name, bad := range map[string]map[string]any{
		"an error": {"resultCode": 500, "errorCode": 500, "message": "broken"},
		"no list":  {"resultCode": 200},
	} {
		t.Run(name, func(t *testing.T) {
			f := startFake(t, "10.0.0.1")
			f.answer(func(_ context.Context, r fakeRequest) map[string]any {
				if r.Type == "ServiceListRequest" && r.Namespace == "" {
					return bad
				}
				return nil
			})
			c := fakeConfig(f)
			c.ListInterval = plugin.Duration(500 * time.Millisecond)
			b := runFake(t, c)
			b.eventually(t, "it failed", func() bool {
				return strings.Contains(b.Held.Degraded, `list the services of namespace ""`) && b.Held.IDs("public/G/web") == "10.0.0.1:80"
			})
			f.push("10.0.0.2") // whatever followed from the answer is through when this is
			b.eventually(t, "a push", func() bool { return b.Held.IDs("public/G/web") == "10.0.0.2:80" && !b.Held.Synced })
			f.answer(nil)
			b.eventually(t, "it is simply empty", func() bool { return b.Held.Synced && b.Held.Degraded == "" })
		})
	}
}

// TestEmptyNamespaceGroups shows how groups of the empty namespace are found
// where groups are globs, and what is said where they cannot be.
func TestEmptyNamespaceGroups(t *testing.T) {
	for name, test := range map[string]struct {
		status  int
		body    string
		found   bool
		problem string
		state   string
	}{
		"told": {200, `{"services":{"":["ORDERS@@old","OTHER@@x"],"public":["G@@web"]},"count":3}`, true, "", ""},
		"none": {200, `{"services":{"public":["G@@web"]},"count":1}`, false, "", ""},
		"no such API": {
			404, ``, false, "name the groups under config.groups", "",
		},
		"refused":       {403, `{"status":403,"error":"Forbidden"}`, false, "name the groups under config.groups", ""},
		"an error page": {200, `<html>`, false, "", `list the services of namespace ""`},
		"no list":       {200, `{}`, false, "", "the answer is not a list"},
		"broken":        {500, `{}`, false, "", "status 500"},
	} {
		t.Run(name, func(t *testing.T) {
			f := startFake(t, "10.0.0.1")
			f.answer(func(_ context.Context, r fakeRequest) map[string]any {
				if r.Type == "ServiceListRequest" && r.Namespace == "" && r.GroupName == "ORDERS" {
					return map[string]any{"resultCode": 200, "count": 1, "serviceNames": []string{"old"}}
				}
				return nil
			})
			api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				switch r.URL.Path {
				case "/nacos/v3/admin/ns/service/list":
					w.WriteHeader(http.StatusNotFound)
				case "/nacos/v1/ns/catalog/services":
					_, _ = w.Write([]byte(`{"count":1,"serviceList":[{"name":"web","groupName":"G"}]}`))
				case "/nacos/v1/ns/service/names":
					w.WriteHeader(test.status)
					_, _ = w.Write([]byte(test.body))
				default:
					t.Errorf("unknown request %s", r.URL)
				}
			}))
			t.Cleanup(api.Close)
			c := fakeConfig(f)
			c.Servers, c.Groups = []string{api.URL}, []string{"?", "ORD*", "DEFAULT*"}
			c.GRPCPortOffset = portIn(t, f.addr) - portIn(t, api.Listener.Addr().String())
			b := runFake(t, c)
			b.eventually(t, "what there is", func() bool {
				return len(b.Held.Instances["public/G/web"]) > 0 && b.Held.Synced == (test.state == "") && (len(b.Held.Instances["public/ORDERS/old"]) > 0) == test.found &&
					strings.Contains(b.Held.Problems[emptyProblem], test.problem) && (b.Held.Problems[emptyProblem] == "") == (test.problem == "") &&
					strings.Contains(b.Held.Degraded, test.state) && (b.Held.Degraded == "") == (test.state == "")
			})
			b.Look(func(h *plugintest.Held) {
				if h.IDs("public/OTHER/x") != "-" {
					t.Error("a group was followed that is not selected")
				}
			})
		})
	}
}

func portIn(t *testing.T, addr string) int {
	t.Helper()
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		t.Fatal(err)
	}
	n, err := strconv.Atoi(port)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// TestWithoutInstances shows that an answer or a push that does not say which
// instances a service has is none: what is known stays.
func TestWithoutInstances(t *testing.T) {
	f := startFake(t, "10.0.0.1")
	b := runFake(t, fakeConfig(f))
	b.eventually(t, "followed", func() bool { return b.Held.Synced && b.Held.IDs("public/G/web") == "10.0.0.1:80" })
	for _, nothing := range []map[string]any{
		{"resultCode": 200},
		{"resultCode": 200, "serviceInfo": nil},
		{"resultCode": 200, "serviceInfo": map[string]any{"name": "web", "groupName": "G"}},
		{"resultCode": 200, "serviceInfo": map[string]any{"name": "web", "groupName": "G", "hosts": nil}},
	} {
		f.answer(func(_ context.Context, r fakeRequest) map[string]any {
			if r.Type == "SubscribeServiceRequest" || r.Type == "ServiceQueryRequest" {
				return nothing
			}
			return nil
		})
		f.push("")
		b.eventually(t, "a query after an empty push", func() bool { return strings.Contains(b.Held.Degraded, "no list of instances") })
		f.answer(nil)
		b.eventually(t, "a whole answer", func() bool { return b.Held.Degraded == "" && b.Held.IDs("public/G/web") == "10.0.0.1:80" })
	}
	f.send(typePush, `{"requestId":"1","serviceInfo":{"name":"web","groupName":"G"}}`)
	b.eventually(t, "a push without instances", func() bool { return strings.Contains(b.Held.Problems["service public/G/web"], "no list of instances") })
	f.push("10.0.0.1 10.0.0.2")
	b.eventually(t, "a whole push", func() bool {
		return len(b.Held.Problems) == 0 && b.Held.IDs("public/G/web") == "10.0.0.1:80 10.0.0.2:80"
	})
	b.Look(func(h *plugintest.Held) {
		if h.Least["public/G/web"] < 1 {
			t.Error("web was without instances for a while")
		}
	})
}

// TestPersistent shows persistent instances, as a server of 2.x writes them.
func TestPersistent(t *testing.T) {
	host := func(ip string, healthy bool) string {
		return `{"ip":"` + ip + `","port":80,"weight":1.0,"healthy":` + strconv.FormatBool(healthy) + `,"enabled":true,"ephemeral":false,"clusterName":"DEFAULT",` +
			`"serviceName":"G@@web","metadata":{},"instanceHeartBeatInterval":5000,"instanceHeartBeatTimeOut":15000,"ipDeleteTimeout":30000,"instanceIdGenerator":"simple"}`
	}
	service := func(clock int, hosts ...string) string {
		return `{"name":"web","groupName":"G","clusters":"","cacheMillis":10000,"hosts":[` + strings.Join(hosts, ",") + `],"lastRefTime":` + strconv.Itoa(clock) +
			`,"checksum":"","allIPs":false,"reachProtectionThreshold":false,"valid":true}`
	}
	f := startFake(t, "")
	var mu sync.Mutex // guards now
	now := service(1, host("10.0.0.1", true))
	f.answer(func(_ context.Context, r fakeRequest) map[string]any {
		if r.Type != "SubscribeServiceRequest" && r.Type != "ServiceQueryRequest" {
			return nil
		}
		mu.Lock()
		defer mu.Unlock()
		return map[string]any{"resultCode": 200, "serviceInfo": json.RawMessage(now)}
	})
	push := func(s string) {
		mu.Lock()
		defer mu.Unlock()
		now = s
		f.send(typePush, `{"headers":{},"requestId":"1","serviceInfo":`+s+`,"module":"naming"}`)
	}
	b := runFake(t, fakeConfig(f))
	b.eventually(t, "answered", func() bool { return b.Held.Synced && b.Held.IDs("public/G/web") == "10.0.0.1:80" })
	push(service(2, host("10.0.0.1", false), host("10.0.0.2", true)))
	b.eventually(t, "pushed", func() bool {
		i := b.Held.Instances["public/G/web"]
		return len(i) == 2 && i[0].Health == registry.HealthCritical && i[1].Health == registry.HealthPassing
	})
	push(service(3))
	b.eventually(t, "deregistered, which a query confirms", func() bool { return b.Held.IDs("public/G/web") == "" })
	push(service(4, host("10.0.0.3", true)))
	b.eventually(t, "registered again", func() bool { return b.Held.IDs("public/G/web") == "10.0.0.3:80" })
	b.WantDegraded(t, "all of it", "")
}

// TestHTTPS shows login, list and instances over TLS with a client certificate,
// below a context path of its own.
func TestHTTPS(t *testing.T) {
	ca := testcert.New(t, "nacos.example.org")
	mux := http.NewServeMux()
	handle := func(path, answer string) {
		mux.HandleFunc(path, func(w http.ResponseWriter, r *http.Request) {
			switch {
			case strings.HasSuffix(path, "/login"):
				if r.FormValue("username") != "u" || r.FormValue("password") != "p" {
					t.Errorf("%s: form %v", path, r.Form)
				}
			case strings.HasSuffix(path, "/metrics"):
			case r.Header.Get("accessToken") != "t1" || r.Header.Get("Authorization") != "Bearer t1":
				t.Errorf("%s: headers %v", path, r.Header)
			}
			_, _ = w.Write([]byte(answer))
		})
	}
	gone := func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNotFound) }
	mux.HandleFunc("/registry/a/v3/auth/user/login", gone)
	mux.HandleFunc("/registry/a/v3/admin/ns/service/list", gone)
	handle("/registry/a/v1/auth/users/login", `{"accessToken":"t1","tokenTtl":18000}`)
	handle("/registry/a/v1/ns/operator/metrics", `{"status":"UP"}`)
	handle("/registry/a/v1/ns/catalog/services", `{"count":1,"serviceList":[{"name":"web","groupName":"G"}]}`)
	handle("/registry/a/v1/ns/instance/list", `{"name":"G@@web","hosts":[{"ip":"10.0.0.1","port":80,"weight":1,"healthy":true,"enabled":true}]}`)
	mux.HandleFunc("/", func(_ http.ResponseWriter, r *http.Request) { t.Errorf("unknown request %s", r.URL) })
	api := httptest.NewUnstartedServer(mux)
	api.TLS = ca.Server(ca)
	api.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	api.StartTLS()
	t.Cleanup(api.Close)
	config := func(server, context string) Config {
		c := DefaultConfig
		c.Servers, c.ContextPath, c.Protocol = []string{server}, context, protocolHTTP
		c.Username, c.Password, c.GRPCPortOffset = "u", "p", 1
		c.TLS = TLSConfig{TLS: plugin.TLS{CAFile: ca.Cert, CertFile: ca.Cert, KeyFile: ca.Key, ServerName: "nacos.example.org"}}
		return c
	}
	for name, c := range map[string]Config{
		"context in the address": config(api.URL+"/registry/a/", "/nacos"),
		"context by itself":      config(api.URL, "registry/a"),
	} {
		b := runFake(t, c)
		b.eventually(t, name, func() bool { return b.Held.Synced && b.Held.IDs("public/G/web") == "10.0.0.1:80" })
		b.WantDegraded(t, name, "")
	}
	bad := config(api.URL, "/registry/a")
	bad.TLS.CAFile = ""
	b := runFake(t, bad)
	b.eventually(t, "an unknown authority", func() bool { return strings.Contains(b.Held.Degraded, "unknown authority") && !b.Held.Synced })
	bad = config(api.URL, "/registry/a")
	bad.TLS.CertFile, bad.TLS.KeyFile = "", ""
	b = runFake(t, bad)
	b.eventually(t, "no client certificate", func() bool { return strings.Contains(b.Held.Degraded, "login: ") && !b.Held.Synced })
}

// TestTLS shows TLS with an authority and a client certificate of one's own,
// and what happens without.
func TestTLS(t *testing.T) {
	ca := testcert.New(t, "nacos.example.org")
	cert, keyFile := ca.Cert, ca.Key
	f := startFake(t, "10.0.0.1", grpc.Creds(credentials.NewTLS(ca.Server(ca))))
	s, err := parseServer(fakeConfig(f).Servers[0], "/nacos", 1)
	if err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		config plugin.TLS
		want   string // part of the error
	}{
		"all of it":            {plugin.TLS{CAFile: cert, CertFile: cert, KeyFile: keyFile, ServerName: "nacos.example.org"}, ""},
		"another name":         {plugin.TLS{CAFile: cert, CertFile: cert, KeyFile: keyFile, ServerName: "other.example.org"}, "other.example.org"},
		"an unknown authority": {plugin.TLS{CertFile: cert, KeyFile: keyFile, ServerName: "nacos.example.org"}, "unknown authority"},
		// With TLS 1.3 the server's alert comes after the handshake, and a
		// write may fail before it is read: the reason is not always told.
		"no client certificate": {plugin.TLS{CAFile: cert, ServerName: "nacos.example.org"}, "ServerCheckRequest"},
		"not verified":          {plugin.TLS{CertFile: cert, KeyFile: keyFile, InsecureSkipVerify: true}, ""},
	} {
		c, err := dial(t.Context(), s, TLSConfig{GRPC: true, TLS: test.config}, newAuth(Config{}, nil, nil), slog.New(slog.DiscardHandler))
		if err == nil {
			c.close()
		}
		if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: error %v, want %q", name, err, test.want)
		}
	}
	for field, bad := range map[string]plugin.TLS{"tls.ca_file": {CAFile: keyFile}, "tls.cert_file": {CertFile: cert, KeyFile: cert}} {
		c := fakeConfig(f)
		c.TLS.TLS, c.TLS.GRPC = bad, true
		if _, err := newAdapter(c, plugin.Env{}); err == nil || !strings.Contains(err.Error(), field) {
			t.Errorf("%s: error %v", field, err)
		}
	}
}
