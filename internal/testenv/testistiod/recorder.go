package testistiod

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	cluster "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	endpoint "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	listener "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"
	route "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	hcm "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	tcpproxy "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/tcp_proxy/v3"
	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testwait"
)

// Type URLs that a proxy subscribes to.
const (
	typePrefix = "type.googleapis.com/"
	cdsType    = typePrefix + "envoy.config.cluster.v3.Cluster"
	edsType    = typePrefix + "envoy.config.endpoint.v3.ClusterLoadAssignment"
	ldsType    = typePrefix + "envoy.config.listener.v3.Listener"
	rdsType    = typePrefix + "envoy.config.route.v3.RouteConfiguration"
	ndsType    = typePrefix + "istio.networking.nds.v1.NameTable"
)

var kindOf = map[string]string{cdsType: "cds", edsType: "eds", ldsType: "lds", rdsType: "rds", ndsType: "nds"}

// OutboundCluster returns istiod's name of the cluster for one port of a host.
func OutboundCluster(host string, port int) string {
	return "outbound|" + strconv.Itoa(port) + "||" + host
}

// Push is one response to a proxy.
type Push struct {
	Time time.Time
	// Kind is "cds", "eds", "lds", "rds" or "nds".
	Kind string
	// Names are the names of its resources, sorted; in a push of the name table
	// they are the hosts.
	Names []string
	// Endpoints is the number of endpoints by cluster, in a push of endpoints.
	Endpoints map[string]int
}

// String returns the push as one line, with names truncated.
func (p Push) String() string {
	return fmt.Sprintf("%s %s %d %.200v", p.Time.Format("15:04:05.000"), p.Kind, len(p.Names), p.Names)
}

// Recorder is a sidecar proxy or a waypoint to istiod. It records what it
// receives, and configures nothing.
type Recorder struct {
	name string

	// guarded by mu
	mu        sync.Mutex
	pushes    []Push
	clusters  map[string]*cluster.Cluster
	endpoints map[string]*endpoint.ClusterLoadAssignment
	listeners map[string]*listener.Listener
	routes    map[string]*route.RouteConfiguration
	hosts     map[string][]string // addresses by host, of the newest name table
	onChange  func(clusterName string, endpoints []string)
	ended     error // why the stream ended; nil while it is open
}

// StartRecorder connects to a ready istiod as a sidecar that captures DNS, and
// subscribes to clusters, endpoints, listeners, routes and the name table. The
// stream ends with the test; if it ends earlier, the next wait fails.
func StartRecorder(t testing.TB, i *Server) *Recorder {
	t.Helper()
	return startRecorder(t, i, "sidecar~127.0.0.9~recorder.default~default.svc.cluster.local", map[string]any{"NAMESPACE": "default", "ISTIO_VERSION": "1.24.0", "CLUSTER_ID": "Kubernetes", "DNS_CAPTURE": "true"})
}

// StartWaypoint is [StartRecorder] as a pod of a waypoint.
func StartWaypoint(t testing.TB, i *Server, namespace, name string) *Recorder {
	t.Helper()
	return startRecorder(t, i, fmt.Sprintf("waypoint~127.0.0.8~%[2]s.%[1]s~%[1]s.svc.cluster.local", namespace, name), map[string]any{
		"NAMESPACE": namespace, "ISTIO_VERSION": "1.24.0", "CLUSTER_ID": "Kubernetes",
		"LABELS": map[string]any{"gateway.networking.k8s.io/gateway-name": name},
	})
}

// InboundCluster returns a waypoint's name of the cluster for one port of a
// host, for http or tcp.
func InboundCluster(host string, port int, protocol string) string {
	return "inbound-vip|" + strconv.Itoa(port) + "|" + protocol + "|" + host
}

func startRecorder(t testing.TB, i *Server, node string, metadata map[string]any) *Recorder {
	t.Helper()
	r := &Recorder{
		name:      "recorder behind " + i.Version.Name,
		clusters:  map[string]*cluster.Cluster{},
		endpoints: map[string]*endpoint.ClusterLoadAssignment{},
		listeners: map[string]*listener.Listener{},
		routes:    map[string]*route.RouteConfiguration{},
	}
	conn, err := grpc.NewClient(i.GRPC, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(256<<20)))
	if err != nil {
		t.Fatalf("%s: %v", r.name, err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	stream, err := discovery.NewAggregatedDiscoveryServiceClient(conn).StreamAggregatedResources(ctx)
	if err != nil {
		t.Fatalf("%s: open a stream: %v", r.name, err)
	}
	var done sync.WaitGroup
	// Owned by the recorder; ends when the cleanup cancels the stream.
	done.Go(func() {
		err := r.receive(stream, node, metadata)
		r.mu.Lock()
		defer r.mu.Unlock()
		r.ended = err
	})
	t.Cleanup(func() {
		cancel()
		done.Wait()
		conn.Close()
		if t.Failed() {
			t.Logf("---- %s\n%s", r.name, r.describe())
		}
	})
	return r
}

// receive subscribes, acknowledges and records until the stream ends. What it
// has recorded it reads without the lock, as nobody else changes it.
func (r *Recorder) receive(stream discovery.AggregatedDiscoveryService_StreamAggregatedResourcesClient, id string, fields map[string]any) error {
	metadata, err := structpb.NewStruct(fields)
	if err != nil {
		return err
	}
	node := &core.Node{Id: id, Metadata: metadata}
	// The names and acknowledgement of the last request of each type.
	type asked struct {
		names          []string
		version, nonce string
	}
	state := map[string]*asked{}
	send := func(typeURL string) error {
		a := state[typeURL]
		err := stream.Send(&discovery.DiscoveryRequest{
			Node: node, TypeUrl: typeURL, ResourceNames: a.names, VersionInfo: a.version, ResponseNonce: a.nonce,
		})
		if errors.Is(err, io.EOF) {
			return nil // the cause comes from Recv
		}
		return err
	}
	for _, wildcard := range []string{cdsType, ldsType, ndsType} {
		state[wildcard] = &asked{}
		if err := send(wildcard); err != nil {
			return err
		}
	}
	for {
		res, err := stream.Recv()
		if err != nil {
			return err
		}
		if err := r.record(res); err != nil {
			return err
		}
		a := state[res.TypeUrl]
		a.version, a.nonce = res.VersionInfo, res.Nonce
		if err := send(res.TypeUrl); err != nil {
			return err
		}
		// Clusters name endpoints, listeners name routes.
		var dependent string
		var names []string
		switch res.TypeUrl {
		case cdsType:
			dependent, names = edsType, r.edsClusters()
		case ldsType:
			dependent, names = rdsType, r.routeNames()
		default:
			continue
		}
		if state[dependent] == nil {
			state[dependent] = &asked{}
		}
		// A request without names would subscribe to all.
		if len(names) == 0 || slices.Equal(names, state[dependent].names) {
			continue
		}
		state[dependent].names = names
		if err := send(dependent); err != nil {
			return err
		}
	}
}

func (r *Recorder) record(res *discovery.DiscoveryResponse) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := Push{Time: time.Now(), Kind: kindOf[res.TypeUrl]}
	// Clusters, listeners and the name table are always complete; endpoints and
	// routes are those that changed.
	switch res.TypeUrl {
	case ndsType:
		r.hosts = map[string][]string{}
		for _, body := range res.Resources {
			var table nameTable
			if err := proto.Unmarshal(body.Value, protoadapt.MessageV2Of(&table)); err != nil {
				return fmt.Errorf("decode the table of names: %w", err)
			}
			for host, info := range table.Table {
				r.hosts[host] = append([]string{}, info.IPs...)
			}
		}
		p.Names = slices.Sorted(maps.Keys(r.hosts))
		r.pushes = append(r.pushes, p)
		return nil
	case cdsType:
		clear(r.clusters)
	case ldsType:
		clear(r.listeners)
	}
	for _, body := range res.Resources {
		m, err := body.UnmarshalNew()
		if err != nil {
			return fmt.Errorf("decode %s: %w", body.TypeUrl, err)
		}
		var name string
		switch m := m.(type) {
		case *cluster.Cluster:
			name = m.Name
			r.clusters[name] = m
		case *endpoint.ClusterLoadAssignment:
			name = m.ClusterName
			r.endpoints[name] = m
			if p.Endpoints == nil {
				p.Endpoints = map[string]int{}
			}
			p.Endpoints[name] = len(r.endpointsLocked(name))
			r.tellLocked(name)
		case *listener.Listener:
			name = m.Name
			r.listeners[name] = m
		case *route.RouteConfiguration:
			name = m.Name
			r.routes[name] = m
		default:
			return fmt.Errorf("got a %s, asked for none", body.TypeUrl)
		}
		p.Names = append(p.Names, name)
	}
	if res.TypeUrl == cdsType {
		for name := range r.endpoints {
			if r.clusters[name] == nil {
				delete(r.endpoints, name)
				r.tellLocked(name)
			}
		}
	}
	slices.Sort(p.Names)
	r.pushes = append(r.pushes, p)
	return nil
}

// OnEndpoints calls f with the endpoints of each cluster, in the format of
// WaitEndpoints, now and whenever they arrive; nil for a cluster that is gone.
// It must not call the recorder.
func (r *Recorder) OnEndpoints(f func(clusterName string, endpoints []string)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.onChange = f
	for name := range r.endpoints {
		r.tellLocked(name)
	}
}

func (r *Recorder) tellLocked(clusterName string) {
	if r.onChange != nil {
		r.onChange(clusterName, r.endpointsLocked(clusterName))
	}
}

// edsClusters returns the names of the clusters whose endpoints come on their
// own, sorted.
func (r *Recorder) edsClusters() (names []string) {
	for name, c := range r.clusters {
		if c.GetType() == cluster.Cluster_EDS {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// routeNames returns the names of the routes that listeners name, sorted.
func (r *Recorder) routeNames() (names []string) {
	for _, l := range r.listeners {
		for _, filter := range filters(l) {
			var manager hcm.HttpConnectionManager
			if body := filter.GetTypedConfig(); body.MessageIs(&manager) && body.UnmarshalTo(&manager) == nil && manager.GetRds() != nil {
				names = append(names, manager.GetRds().RouteConfigName)
			}
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// filters returns the filters of all chains of a listener.
func filters(l *listener.Listener) (all []*listener.Filter) {
	for _, chain := range append(slices.Clone(l.FilterChains), l.DefaultFilterChain) {
		all = append(all, chain.GetFilters()...)
	}
	return all
}

// nameTable and nameInfo are messages of istio/networking/nds/v1/nds.proto, for
// which Istio publishes no Go package, as code that was generated for them
// before Go's second API of protobuf would have them.
type nameTable struct {
	Table map[string]*nameInfo `protobuf:"bytes,1,rep,name=table,proto3" protobuf_key:"bytes,1,opt,name=key,proto3" protobuf_val:"bytes,2,opt,name=value,proto3"`
}

type nameInfo struct {
	IPs []string `protobuf:"bytes,1,rep,name=ips,proto3"`
}

func (m *nameTable) Reset()         { *m = nameTable{} }
func (m *nameTable) String() string { return fmt.Sprint(m.Table) }
func (*nameTable) ProtoMessage()    {}
func (m *nameInfo) Reset()          { *m = nameInfo{} }
func (m *nameInfo) String() string  { return fmt.Sprint(m.IPs) }
func (*nameInfo) ProtoMessage()     {}

// Names returns the addresses to which the proxy's DNS resolves each host, from
// the newest name table.
func (r *Recorder) Names() map[string][]string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return maps.Clone(r.hosts)
}

// TCPListeners returns the clusters that receive connections to a port, sorted,
// by destination address "IP:PORT". It omits listeners for HTTP, which match
// hosts by other means.
func (r *Recorder) TCPListeners(port int) map[string][]string {
	r.mu.Lock()
	defer r.mu.Unlock()
	found := map[string][]string{}
	for _, l := range r.listeners {
		address := l.GetAddress().GetSocketAddress()
		if int(address.GetPortValue()) != port {
			continue
		}
		at := net.JoinHostPort(address.GetAddress(), strconv.Itoa(port))
		for _, filter := range filters(l) {
			var proxy tcpproxy.TcpProxy
			if body := filter.GetTypedConfig(); body.MessageIs(&proxy) && body.UnmarshalTo(&proxy) == nil {
				found[at] = append(found[at], proxy.GetCluster())
			}
		}
		slices.Sort(found[at])
	}
	return found
}

// Localities returns the localities of a cluster's endpoints as "region/zone",
// by address.
func (r *Recorder) Localities(clusterName string) map[string]string {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := map[string]string{}
	for _, locality := range r.endpoints[clusterName].GetEndpoints() {
		for _, e := range locality.LbEndpoints {
			l := locality.GetLocality()
			out[e.GetEndpoint().GetAddress().GetSocketAddress().GetAddress()] = l.GetRegion() + "/" + l.GetZone()
		}
	}
	return out
}

// Routes returns the clusters that a route leads to, sorted, by domain.
func (r *Recorder) Routes(routeName string) map[string][]string {
	r.mu.Lock()
	defer r.mu.Unlock()
	clusters := map[string][]string{}
	for _, v := range r.routes[routeName].GetVirtualHosts() {
		for _, domain := range v.GetDomains() {
			for _, to := range v.GetRoutes() {
				clusters[domain] = append(clusters[domain], to.GetRoute().GetCluster())
			}
			slices.Sort(clusters[domain])
		}
	}
	return clusters
}

// Pushes returns all responses so far, in order of arrival.
func (r *Recorder) Pushes() []Push {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.pushes)
}

// endpointsLocked returns the endpoints of a cluster: "IP:PORT", followed by
// "*WEIGHT" if the weight is not 1, and by "@VERSION" if the instance has a
// label version, sorted. It is nil if the proxy does not have the cluster's
// endpoints, and empty if there are none.
func (r *Recorder) endpointsLocked(clusterName string) []string {
	assignment := r.endpoints[clusterName]
	if assignment == nil {
		return nil
	}
	eps := []string{}
	for _, locality := range assignment.Endpoints {
		for _, e := range locality.LbEndpoints {
			address := e.GetEndpoint().GetAddress().GetSocketAddress()
			s := net.JoinHostPort(address.GetAddress(), strconv.Itoa(int(address.GetPortValue())))
			if w := cmp.Or(e.GetLoadBalancingWeight().GetValue(), 1); w != 1 {
				s += "*" + strconv.Itoa(int(w))
			}
			// istiod sends the label for the proxy's metrics, in
			// "NAME;NAMESPACE;SERVICE;VERSION;CLUSTER".
			workload := e.GetMetadata().GetFilterMetadata()["istio"].GetFields()["workload"].GetStringValue()
			if fields := strings.Split(workload, ";"); len(fields) > 3 && fields[3] != "" {
				s += "@" + fields[3]
			}
			eps = append(eps, s)
		}
	}
	slices.Sort(eps)
	return eps
}

// WaitEndpoints waits until the cluster has exactly the wanted endpoints, in
// the format "IP:PORT", see endpointsLocked.
func (r *Recorder) WaitEndpoints(t testing.TB, clusterName string, want ...string) {
	t.Helper()
	want = slices.Sorted(slices.Values(want))
	r.wait(t, fmt.Sprintf("%s to have endpoints %v", clusterName, want), func() bool {
		got := r.endpointsLocked(clusterName)
		return got != nil && slices.Equal(got, want)
	})
}

// WaitNoCluster waits until the proxy does not have the cluster.
func (r *Recorder) WaitNoCluster(t testing.TB, clusterName string) {
	t.Helper()
	r.wait(t, clusterName+" to be gone", func() bool { return len(r.pushes) > 0 && r.clusters[clusterName] == nil })
}

// WaitSubscribed waits until the proxy has received every kind, so that later
// responses are pushes.
func (r *Recorder) WaitSubscribed(t testing.TB) {
	t.Helper()
	r.wait(t, "the first answer of each kind", func() bool {
		for _, c := range r.clusters {
			if c.GetType() == cluster.Cluster_EDS && r.endpoints[c.Name] == nil {
				return false
			}
		}
		for _, name := range r.routeNames() {
			if r.routes[name] == nil {
				return false
			}
		}
		for _, kind := range []string{"cds", "lds", "nds"} {
			if !slices.ContainsFunc(r.pushes, func(p Push) bool { return p.Kind == kind }) {
				return false
			}
		}
		return true
	})
}

func (r *Recorder) wait(t testing.TB, what string, reached func() bool) {
	t.Helper()
	var ended error
	if seen, ok := testwait.Poll(t, testenv.Patience, nil, func() (string, bool) {
		r.mu.Lock()
		defer r.mu.Unlock()
		ended = r.ended
		// An ended stream delivers nothing more: fail at once, below.
		return "", reached() || ended != nil
	}); !ok || ended != nil {
		t.Fatalf("%s: waited %v for %s; saw %s\n%s", r.name, testenv.Patience, what, seen, r.describe())
	}
}

// describe returns the recorder's state, for the log of a failed test.
func (r *Recorder) describe() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var b strings.Builder
	if r.ended != nil {
		fmt.Fprintf(&b, "stream ended: %v\n", r.ended)
	}
	fmt.Fprintf(&b, "%d clusters\n", len(r.clusters))
	names := slices.Sorted(maps.Keys(r.endpoints))
	for _, name := range names[:min(len(names), 20)] {
		fmt.Fprintf(&b, "endpoints of %s: %v\n", name, r.endpointsLocked(name))
	}
	last := r.pushes[max(0, len(r.pushes)-12):]
	for _, p := range last {
		fmt.Fprintln(&b, p)
	}
	return b.String()
}
