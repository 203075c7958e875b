package nacos_test

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"regexp"
	"runtime/pprof"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	grpcapi "github.com/nacos-group/nacos-sdk-go/v2/api/grpc"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/peer"

	"github.com/isthmus-mesh/isthmus/adapters/nacos"
	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testnacos"
	"github.com/isthmus-mesh/isthmus/plugin"
)

// proxy is a gRPC server that hands everything to Nacos, over one connection
// for each of its clients, and cuts a client's connection when a message of
// some type passes.
type proxy struct {
	grpcapi.UnimplementedRequestServer
	grpcapi.UnimplementedBiRequestStreamServer
	target string
	addr   string

	mu         sync.Mutex // guards everything below
	conns      map[string]net.Conn
	upstream   map[string]*grpc.ClientConn
	cutAt      string // type of the message to cut at, once
	cuts       int
	seen       map[string]int
	subscribed map[string]bool
}

// newProxy starts a proxy to the server.
func newProxy(t testing.TB, server *testnacos.Server) *proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{
		target: server.GRPC, addr: l.Addr().String(), conns: map[string]net.Conn{}, upstream: map[string]*grpc.ClientConn{},
		seen: map[string]int{}, subscribed: map[string]bool{},
	}
	s := grpc.NewServer(grpc.MaxRecvMsgSize(64 << 20))
	grpcapi.RegisterRequestServer(s, p)
	grpcapi.RegisterBiRequestStreamServer(s, p)
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = s.Serve(&recordingListener{l, p})
	}()
	t.Cleanup(func() {
		s.Stop()
		<-served
		p.mu.Lock()
		defer p.mu.Unlock()
		for _, cc := range p.upstream {
			cc.Close()
		}
	})
	return p
}

// recordingListener remembers the connections by the address of the other end.
type recordingListener struct {
	net.Listener
	p *proxy
}

func (l *recordingListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	c = &recordedConn{c, l.p}
	l.p.mu.Lock()
	defer l.p.mu.Unlock()
	l.p.conns[c.RemoteAddr().String()] = c
	return c, nil
}

// recordedConn is forgotten when it is closed.
type recordedConn struct {
	net.Conn
	p *proxy
}

func (c *recordedConn) Close() error {
	c.p.mu.Lock()
	delete(c.p.conns, c.RemoteAddr().String())
	c.p.mu.Unlock()
	return c.Conn.Close()
}

// to returns the connection to Nacos of the client that ctx belongs to.
func (p *proxy) to(ctx context.Context) (*grpc.ClientConn, string, error) {
	from, _ := peer.FromContext(ctx)
	client := from.Addr.String()
	p.mu.Lock()
	defer p.mu.Unlock()
	if cc := p.upstream[client]; cc != nil {
		return cc, client, nil
	}
	cc, err := grpc.NewClient("passthrough:///"+p.target, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<20)))
	if err != nil {
		return nil, "", err
	}
	p.upstream[client] = cc
	return cc, client, nil
}

// passes notes a message, and cuts the client's connection if it is the one to
// cut at.
func (p *proxy) passes(client string, m *grpcapi.Payload) bool {
	typ := m.GetMetadata().GetType()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.seen[typ]++
	if typ == "SubscribeServiceRequest" {
		var r struct {
			Namespace, GroupName, ServiceName string
			Subscribe                         bool
		}
		_ = json.Unmarshal(m.GetBody().GetValue(), &r)
		if key := r.Namespace + "/" + r.GroupName + "/" + r.ServiceName; r.Subscribe {
			p.subscribed[key] = true
		} else {
			delete(p.subscribed, key)
		}
	}
	if p.cutAt != typ {
		return true
	}
	p.cutAt = ""
	p.cuts++
	if c := p.conns[client]; c != nil {
		go c.Close() // it wants mu
	}
	if cc := p.upstream[client]; cc != nil {
		cc.Close()
		delete(p.upstream, client)
	}
	return false
}

func (p *proxy) Request(ctx context.Context, m *grpcapi.Payload) (*grpcapi.Payload, error) {
	cc, client, err := p.to(ctx)
	if err != nil {
		return nil, err
	}
	if !p.passes(client, m) {
		return nil, context.Canceled
	}
	answer, err := grpcapi.NewRequestClient(cc).Request(ctx, m)
	if err == nil && !p.passes(client, answer) {
		return nil, context.Canceled
	}
	return answer, err
}

func (p *proxy) RequestBiStream(down grpc.BidiStreamingServer[grpcapi.Payload, grpcapi.Payload]) error {
	cc, client, err := p.to(down.Context())
	if err != nil {
		return err
	}
	up, err := grpcapi.NewBiRequestStreamClient(cc).RequestBiStream(down.Context())
	if err != nil {
		return err
	}
	done := make(chan error, 2)
	go func() {
		for {
			m, err := down.Recv()
			if err == nil && p.passes(client, m) {
				err = up.Send(m)
			}
			if err != nil {
				done <- err
				return
			}
		}
	}()
	go func() {
		for {
			m, err := up.Recv()
			if err == nil && p.passes(client, m) {
				err = down.Send(m)
			}
			if err != nil {
				done <- err
				return
			}
		}
	}()
	err = <-done
	p.mu.Lock()
	defer p.mu.Unlock()
	if now := p.upstream[client]; now == cc {
		delete(p.upstream, client)
	}
	cc.Close()
	return err
}

// behind makes the adapter reach gRPC through the proxy.
func (p *proxy) behind(t testing.TB, server *testnacos.Server) func(*nacos.Config) {
	t.Helper()
	port := func(addr string) int {
		_, s, err := net.SplitHostPort(addr)
		if err != nil {
			t.Fatal(err)
		}
		n, err := strconv.Atoi(s)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	offset := port(p.addr) - port(server.Addr)
	return func(c *nacos.Config) { c.GRPCPortOffset = offset }
}

func (p *proxy) arm(typ string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cutAt, p.cuts = typ, 0
}

// connections is how many connections clients have to the proxy.
func (p *proxy) connections() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.conns)
}

func (p *proxy) count() (cuts, subscribed int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.cuts, len(p.subscribed)
}

// cut cuts the connection at every type of message, before the first listing
// and later: nothing is lost or removed, and everything arrives.
func cut(t *testing.T, server *testnacos.Server) {
	types := []string{
		"ServerCheckRequest", "ServerCheckResponse", "ConnectionSetupRequest", "HealthCheckRequest", "HealthCheckResponse",
		"SubscribeServiceRequest", "SubscribeServiceResponse", "NotifySubscriberRequest", "NotifySubscriberResponse",
		"ServiceQueryRequest", "QueryServiceResponse",
	}
	if server.Version.V3 {
		types = append(types, "SetupAckRequest", "SetupAckResponse", "NamingFuzzyWatchRequest", "NamingFuzzyWatchResponse",
			"NamingFuzzyWatchSyncRequest", "NamingFuzzyWatchSyncResponse", "NamingFuzzyWatchChangeNotifyRequest", "NamingFuzzyWatchChangeNotifyResponse")
	} else {
		types = append(types, "ServiceListRequest", "ServiceListResponse")
	}
	app := server.Client(t)
	app.Register(t, "public", "C", "steady", testnacos.Up("10.1.0.1", 80), testnacos.Up("10.1.0.2", 80))
	for n, typ := range types {
		t.Run("cut at "+typ, func(t *testing.T) {
			t.Parallel()
			p := newProxy(t, server)
			p.arm(typ)
			c := follow(t, server, p.behind(t, server), func(c *nacos.Config) {
				c.Groups, c.RemoveGrace, c.Protocol = []string{"C"}, plugin.Duration(2*time.Second), "grpc"
			})
			// A service that comes, changes, loses everything and goes, so that
			// each type occurs.
			name := fmt.Sprintf("svc-%d", n)
			key := "public/C/" + name
			if !strings.Contains(typ, "Fuzzy") {
				c.awaitSynced(t)
			}
			app.Register(t, "public", "C", name, testnacos.Up("10.1.1.1", 80))
			c.awaitService(t, "a service that appears", key, count(1))
			app.Register(t, "public", "C", name, testnacos.Up("10.1.1.1", 80), testnacos.Up("10.1.1.2", 80))
			c.awaitService(t, "scaled out", key, count(2))
			app.Register(t, "public", "C", name)
			c.await(t, "all instances gone", func() bool { return len(c.Held.Instances[key]) == 0 })
			server.DeleteService(t, "public", "C", name)
			c.await(t, "gone", func() bool { _, ok := c.Held.Instances[key]; return !ok })
			c.awaitSynced(t)
			c.awaitService(t, "what did not change", "public/C/steady", count(2))
			c.awaitState(t, "")
			if cuts, _ := p.count(); cuts != 1 {
				t.Errorf("%d cuts at %s, want one; seen %v", cuts, typ, p.seen)
			}
			if least, ok := c.leastOf("public/C/steady"); ok && least != 2 {
				t.Errorf("the service that did not change was down to %d instances", least)
			}
		})
	}
}

// comeAndGo shows that services that come and go leave no goroutine, connection
// or subscription behind.
func comeAndGo(t *testing.T, server *testnacos.Server, n int) {
	p := newProxy(t, server)
	app := server.Client(t)
	app.Register(t, "public", "L", "steady", testnacos.Up("10.1.0.1", 80))
	var c *catalog
	// Goroutines inherit labels, so that those of this adapter can be told from
	// all others.
	pprof.Do(t.Context(), pprof.Labels("adapter", t.Name()), func(context.Context) {
		c = follow(t, server, p.behind(t, server), func(c *nacos.Config) { c.Groups = []string{"L"} })
	})
	c.awaitSynced(t)
	_, subscribedBefore := p.count()
	if subscribedBefore != 1 {
		t.Fatalf("%d subscriptions to one service", subscribedBefore)
	}
	before := goroutinesOf(t, t.Name())
	if before == 0 {
		t.Fatal("the adapter has no goroutine: they are not counted as they should be")
	}
	each(t, n, func(i int) error {
		return app.TryRegister(t.Context(), "public", "L", "leak-"+strconv.Itoa(i), testnacos.Up("10.1.0.1", 1+i))
	})
	c.await(t, "all came", func() bool { return len(c.Held.Instances) == subscribedBefore+n })
	each(t, n, func(i int) error {
		return app.TryRegister(t.Context(), "public", "L", "leak-"+strconv.Itoa(i))
	})
	for i := range n {
		server.DeleteService(t, "public", "L", "leak-"+strconv.Itoa(i))
	}
	c.await(t, "all went", func() bool { return len(c.Held.Instances) == subscribedBefore })
	testenv.Eventually(t, within, "subscriptions, connections and goroutines as before", func() (string, bool) {
		_, subscribed := p.count()
		now := goroutinesOf(t, t.Name())
		conns := p.connections()
		return fmt.Sprintf("%d subscriptions, before %d; %d goroutines, before %d; %d connections", subscribed, subscribedBefore, now, before, conns),
			subscribed == subscribedBefore && now <= before+2 && conns == 1
	})
}

// stacks matches the beginning of each group of goroutines with the same stack
// in a profile, their number.
var stacks = regexp.MustCompile(`(?m)^(\d+) @ `)

// goroutinesOf counts the goroutines of the adapter with a label.
func goroutinesOf(t *testing.T, adapter string) int {
	t.Helper()
	var text strings.Builder
	if err := pprof.Lookup("goroutine").WriteTo(&text, 1); err != nil {
		t.Fatal(err)
	}
	label := fmt.Sprintf("%q:%q", "adapter", adapter)
	total := 0
	for same := range strings.SplitSeq(text.String(), "\n\n") {
		if m := stacks.FindStringSubmatch(same); m != nil && strings.Contains(same, label) {
			n, err := strconv.Atoi(m[1])
			if err != nil {
				t.Fatal(err)
			}
			total += n
		}
	}
	return total
}

// BenchmarkIdle counts the requests that a server gets in a minute in which
// nothing changes, with a thousand services.
//
//	go test ./test/nacos ./adapters/nacos -run '^$' -bench 'Change|Idle' -benchtime 100x -timeout 60m
func BenchmarkIdle(b *testing.B) {
	for _, version := range testnacos.Versions() {
		b.Run(version.Name, func(b *testing.B) {
			server := testnacos.Start(b, testnacos.Config{Version: version})
			p := newProxy(b, server)
			load(b, server.Client(b), 1000, 10)
			c := follow(b, server, p.behind(b, server), func(c *nacos.Config) {
				c.ListInterval, c.Groups = nacos.DefaultConfig.ListInterval, []string{"M"}
			})
			c.awaitSynced(b)
			quiet := time.NewTimer(20 * time.Second) // until what follows the first listing is over
			<-quiet.C
			before := p.counts()
			minute := time.NewTimer(time.Minute)
			<-minute.C
			total := 0
			for typ, n := range p.counts() {
				if n -= before[typ]; n > 0 && strings.HasSuffix(typ, "Request") {
					b.Logf("%s: %d", typ, n)
					total += n
				}
			}
			for b.Loop() { //nolint:revive // one minute is enough whatever -benchtime says, and then there is nothing to repeat
			}
			b.ReportMetric(0, "ns/op")
			b.ReportMetric(float64(total), "requests/min")
		})
	}
}

func (p *proxy) counts() map[string]int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return maps.Clone(p.seen)
}
