package nacos

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"math"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	grpcapi "github.com/nacos-group/nacos-sdk-go/v2/api/grpc"
	"github.com/nacos-group/nacos-sdk-go/v2/common/remote/rpc/rpc_response"
	"github.com/nacos-group/nacos-sdk-go/v2/model"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	mcp "istio.io/api/mcp/v1alpha1"
	networking "istio.io/api/networking/v1alpha3"

	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
	"github.com/isthmus-mesh/isthmus/translate"
)

func newTestMirror(t testing.TB, c Config) (*mirror, *book) {
	t.Helper()
	b := newBook()
	return newMirror(c.withDefaults(), slog.New(slog.DiscardHandler), b, newState(b)), b
}

var serverTypes = []string{
	typeSetupAck, typePush, typeConnectReset, typeFuzzySync, typeFuzzyChange, "ClientDetectionRequest", "Unknown", "",
}

var seeds = []string{
	`{"requestId":"1","serviceInfo":{"name":"web","groupName":"G","hosts":[{"ip":"10.0.0.1","port":80,"weight":1,"healthy":true,"enabled":true,"metadata":{"a":"b"}}],"lastRefTime":1}}`,
	`{"requestId":"1","serviceInfo":{"name":"G@@web","hosts":[{"ip":"","port":70000},{"ip":"x","port":1},{"ip":"x","port":1}]}}`,
	`{"requestId":"1","serviceInfo":{"name":"web","groupName":"G","hosts":null}}`,
	`{"requestId":"1","serviceInfo":{"name":"web","groupName":"G"}}`, `{"requestId":"1","serviceInfo":{"name":"web","groupName":"G","hosts":[]}}`,
	`{"requestId":"1","serviceInfo":{"name":"web","groupName":"G","hosts":[{"port":-1}]}}`,
	`{"requestId":"1","groupKeyPattern":"public>>*>>*","syncType":"FUZZY_WATCH_INIT_NOTIFY","contexts":[{"serviceKey":"public@@G@@web","changedType":"ADD_SERVICE"}]}`,
	`{"requestId":"1","groupKeyPattern":"public>>*>>*","syncType":"FINISH_FUZZY_WATCH_INIT_NOTIFY"}`,
	`{"requestId":"1","serviceKey":"public@@G@@web","changedType":"DELETE_SERVICE"}`,
	`{"requestId":1,"serviceInfo":[]}`, `[]`, `null`, ``, `{"abilityTable":{"fuzzyWatch":true},"serverIp":"a","serverPort":"b"}`,
}

// FuzzServerRequest shows that nothing that the server sends on the stream can
// break the adapter, and that what cannot be read removes nothing.
func FuzzServerRequest(f *testing.F) {
	for _, s := range seeds {
		for i := range serverTypes {
			f.Add(i, []byte(s))
		}
	}
	f.Add(0, []byte(strings.Repeat(`{"serviceInfo":`, 9000)+"1"+strings.Repeat("}", 9000)))
	f.Fuzz(func(t *testing.T, n int, body []byte) {
		typ := serverTypes[uint(n)%uint(len(serverTypes))]
		m, catalog := newTestMirror(t, Config{})
		r := &run{mirror: m, catalog: catalog, log: slog.New(slog.DiscardHandler)}
		sc := &scope{namespace: publicNamespace, wire: publicNamespace}
		d := &discovery{mirror: m, state: m.state, log: r.log, patterns: map[string]*pattern{}, config: m.config}
		d.patternsOf(sc)
		session := m.begin(false)
		id := serviceID{publicNamespace, "G", "web"}
		m.add(id)
		known := model.Service{Name: "web", GroupName: "G", Hosts: []model.Instance{{Ip: "10.0.0.9", Port: 9, Weight: 1, Healthy: true, Enable: true}}}
		m.push(session, "G", "web", &known, nil)

		p := &grpcapi.Payload{Metadata: &grpcapi.Metadata{Type: typ}, Body: &anypb.Any{Value: body}}
		req, err := decodeRequest(p)
		if req == nil {
			t.Fatal("no request")
		}
		r.receive(d, session, typ, req, err)
		if ack := encodeAck(typ, req.RequestID); !json.Valid(ack.GetBody().GetValue()) {
			t.Errorf("the answer is not JSON: %q", ack.GetBody().GetValue())
		}
		if got := catalog.Held.Instances["public/G/web"]; len(got) == 0 {
			t.Error("a message alone removed the instances of a service")
		}
	})
}

// canned is a server that has one answer to everything, and keeps what it was
// asked.
type canned struct {
	answer *grpcapi.Payload
	asked  []*grpcapi.Payload
}

func (c *canned) Request(_ context.Context, p *grpcapi.Payload, _ ...grpc.CallOption) (*grpcapi.Payload, error) {
	c.asked = append(c.asked, p)
	return c.answer, nil
}

// FuzzResponse shows the same of every answer to a request.
func FuzzResponse(f *testing.F) {
	for _, s := range seeds {
		f.Add("X", []byte(s))
	}
	for _, s := range []string{
		`{"resultCode":200,"serviceInfo":{"hosts":[{"ip":"a","port":1}]}}`, `{"resultCode":500,"errorCode":403,"message":"no"}`,
		`{"resultCode":200}`, `{"resultCode":200,"serviceInfo":{}}`, `{"resultCode":200,"serviceInfo":{"hosts":null}}`, `{"resultCode":200,"serviceInfo":{"hosts":[]}}`,
		`{"resultCode":200,"count":2,"serviceNames":["a","b"]}`, `{"resultCode":200,"connectionId":"c","supportAbilityNegotiation":true}`,
	} {
		f.Add("ErrorResponse", []byte(s))
		f.Add("X", []byte(s))
	}
	f.Add("X", []byte(strings.Repeat(`{"serviceInfo":`, 9000)+"1"+strings.Repeat("}", 9000)))
	f.Fuzz(func(t *testing.T, typ string, body []byte) {
		c := &conn{client: &canned{answer: &grpcapi.Payload{Metadata: &grpcapi.Metadata{Type: typ}, Body: &anypb.Any{Value: body}}}, sign: newAuth(Config{}, nil, nil)}
		for _, ask := range []func(context.Context, string, string, string) (model.Service, error){c.subscribe, c.query} {
			if info, err := ask(t.Context(), "public", "G", "web"); err == nil && info.Hosts == nil {
				t.Error("an answer without instances was taken for an empty service")
			}
		}
		if _, _, err := c.listPage(t.Context(), "public", "G", 1, 10); err == nil && !bytes.Contains(bytes.ToLower(body), []byte("count")) {
			t.Error("an answer without a count was taken for a list")
		}
		p := &grpcapi.Payload{Metadata: &grpcapi.Metadata{Type: typ}, Body: &anypb.Any{Value: body}}
		for _, into := range []any{
			&rpc_response.SubscribeServiceResponse{}, &rpc_response.QueryServiceResponse{}, &rpc_response.ServiceListResponse{},
			&rpc_response.HealthCheckResponse{}, &serverCheckResponse{}, &rpc_response.Response{},
		} {
			err := decodeResponse(p, into)
			if s, ok := into.(*rpc_response.SubscribeServiceResponse); ok && err == nil {
				_, _ = newConverter(Config{Ports: plugin.PortKeys{{Name: "x", Key: "a"}}, ClusterLocality: "zone"}).instances(s.ServiceInfo.Hosts)
			}
		}
	})
}

// FuzzHTTP shows that no body of the HTTP API breaks the adapter, and that none
// but a whole answer is taken for one.
func FuzzHTTP(f *testing.F) {
	for _, s := range append(slices.Clone(seeds), `{"count":1,"serviceList":[{"name":"a","groupName":"G"}]}`, `{"count":2,"doms":["a"]}`,
		`{"code":0,"data":[{"namespace":"x"}]}`, `{"code":403,"message":"no"}`, `{"hosts":[]}`, `{"accessToken":"x","tokenTtl":1}`, `<html>error</html>`) {
		f.Add([]byte(s))
	}
	var body []byte
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(body) }))
	f.Cleanup(s.Close)
	target, err := parseServer(s.URL, "/nacos", 1000)
	if err != nil {
		f.Fatal(err)
	}
	f.Add([]byte(strings.Repeat(`{"serviceInfo":`, 9000) + "1" + strings.Repeat("}", 9000)))
	f.Fuzz(func(t *testing.T, b []byte) {
		body = b
		c := Config{Username: "u", Password: "p"}
		api := &httpAPI{server: target, client: testClient(t), auth: newAuth(c, testClient(t), nil)}
		ctx := context.Background()
		if service, err := api.query(ctx, "public", "G", "web"); err == nil && service.Hosts == nil {
			t.Error("an answer without hosts was taken for an empty service")
		}
		_, _ = api.namespaces(ctx)
		_, _, _ = api.listGroupPage(ctx, "public", "G", 1, 10)
		_ = api.auth.ensure(ctx, target)
		ids := map[serviceID]bool{}
		total, whole, err := readPages(func(page int) ([]groupedName, int, error) { return api.listAllPage(ctx, "public", page, pageSize) }, "public", ids)
		if err == nil && whole && total != len(ids) {
			t.Errorf("%d services of %d were taken for a whole list", len(ids), total)
		}
	})
}

// TestConvert shows what each field of a host becomes.
func TestConvert(t *testing.T) {
	c := newConverter(Config{Ports: plugin.PortKeys{{Name: "grpc", Key: "gRPC_port", Protocol: "grpc"}}, ClusterLocality: "zone"})
	got, _ := c.instances([]model.Instance{
		{Ip: "10.0.0.2", Port: 80, Weight: 0, Healthy: false, Enable: false},
		{Ip: "10.0.0.1", Port: 80, Weight: 0.5, Healthy: true, Enable: true, Ephemeral: true, ClusterName: "blue", Metadata: map[string]string{"gRPC_port": "90"}},
		{Ip: "10.0.0.2", Port: 80, Weight: 2, Healthy: true, Enable: true, ClusterName: "DEFAULT"},
		{Ip: "::1", Port: math.MaxUint64, Weight: 1, Healthy: true, Enable: true},
	})
	want := []registry.Instance{
		{
			ID: "10.0.0.1:80/blue", Address: "10.0.0.1", Ports: []registry.Port{{Number: 80}, {Name: "grpc", Number: 90, Protocol: "grpc"}},
			Meta: map[string]string{"gRPC_port": "90"}, Weight: new(0.5), Health: registry.HealthPassing, Cluster: "blue", Locality: registry.Locality{Zone: "blue"},
		},
		{ID: "10.0.0.2:80", Address: "10.0.0.2", Ports: []registry.Port{{Number: 80}}, Weight: new(2.0), Health: registry.HealthPassing, Cluster: "DEFAULT"},
		{ID: "[::1]:2147483647", Address: "::1", Ports: []registry.Port{{Number: math.MaxInt32}}, Weight: new(1.0), Health: registry.HealthPassing, Cluster: "DEFAULT"},
	}
	if !plugin.EqualInstances(got, want) {
		t.Errorf("got %+v\nwant %+v", got, want)
	}
}

// TestLocality shows where each value of cluster_locality puts an instance in
// the mesh, and what it needs for that.
func TestLocality(t *testing.T) {
	yes := translate.LocalityOptions{Region: "eu"}
	zoned := translate.LocalityOptions{Region: "eu", ZoneKey: "zone"}
	for _, test := range []struct {
		part, cluster string
		o             translate.LocalityOptions
		want          string
		problem       string // part of it
	}{
		{"none", "blue", yes, "eu", ""},
		{"none", "blue", translate.LocalityOptions{}, "", ""},
		{"region", "blue", translate.LocalityOptions{}, "blue", ""},
		{"zone", "blue", yes, "eu/blue", ""},
		{"zone", "blue", translate.LocalityOptions{}, "", "set translate.locality.region"},
		{"sub_zone", "blue", zoned, "eu/eu-a/blue", ""},
		{"sub_zone", "blue", yes, "eu", "register the zone"},
		{"sub_zone", "blue", translate.LocalityOptions{}, "", "set translate.locality.region"},
		// DEFAULT is what Nacos calls the cluster of who names none.
		{"region", "DEFAULT", translate.LocalityOptions{}, "", ""},
		{"region", "", translate.LocalityOptions{}, "", ""},
		{"zone", "DEFAULT", yes, "eu", ""},
		{"sub_zone", "DEFAULT", zoned, "eu/eu-a", ""},
	} {
		tr, err := translate.New("nacos", translate.Options{Locality: test.o})
		if err != nil {
			t.Fatal(err)
		}
		instances, _ := newConverter(Config{ClusterLocality: test.part}).instances([]model.Instance{
			{Ip: "10.0.0.1", Port: 80, Weight: 1, Healthy: true, Enable: true, ClusterName: test.cluster, Metadata: map[string]string{"zone": "eu-a"}},
		})
		r := tr.Service(registry.Service{Key: registry.Key{Name: "web", Group: "G", Namespace: "public"}}, instances, nil)
		var got []string
		for _, e := range r.Endpoints {
			var m mcp.Resource
			var w networking.WorkloadEntry
			if err := proto.Unmarshal(e.Resource, &m); err != nil {
				t.Fatal(err)
			}
			if err := m.GetBody().UnmarshalTo(&w); err != nil {
				t.Fatal(err)
			}
			got = append(got, w.GetLocality())
		}
		var problems []string
		for _, p := range r.Problems {
			problems = append(problems, p.Reason)
		}
		what := fmt.Sprintf("%s of %q with %+v", test.part, test.cluster, test.o)
		if diff := cmp.Diff([]string{test.want}, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", what, diff)
		}
		if p := strings.Join(problems, "\n"); !strings.Contains(p, test.problem) || (p == "") != (test.problem == "") {
			t.Errorf("%s: problems %q, want %q", what, p, test.problem)
		}
	}
}

// TestReadPages shows which lists are whole.
func TestReadPages(t *testing.T) {
	page := func(total int, names ...string) func() ([]groupedName, int, error) {
		return func() ([]groupedName, int, error) {
			var all []groupedName
			for _, n := range names {
				all = append(all, groupedName{Name: n, GroupName: "G"})
			}
			return all, total, nil
		}
	}
	const many = 500
	full := make([]string, many)
	for i := range full {
		full[i] = strconv.Itoa(i)
	}
	for name, test := range map[string]struct {
		pages []func() ([]groupedName, int, error)
		whole bool
	}{
		"empty":                          {[]func() ([]groupedName, int, error){page(0)}, true},
		"one page":                       {[]func() ([]groupedName, int, error){page(2, "a", "b")}, true},
		"two pages":                      {[]func() ([]groupedName, int, error){page(many+1, full...), page(many+1, "z9z")}, true},
		"changed while it was read":      {[]func() ([]groupedName, int, error){page(many+1, full...), page(many+2, "z9z")}, false},
		"the second page repeats":        {[]func() ([]groupedName, int, error){page(many+1, full...), page(many+1, full[0])}, false},
		"the second page has nothing":    {[]func() ([]groupedName, int, error){page(many+1, full...), page(pageSize + 1)}, false},
		"pages smaller than asked for":   {[]func() ([]groupedName, int, error){page(3, "a", "b"), page(3, "c")}, true},
		"fewer than said, and no more":   {[]func() ([]groupedName, int, error){page(3, "a", "b"), page(3)}, false},
		"more than said, on both pages":  {[]func() ([]groupedName, int, error){page(1, "a", "b")}, false},
		"the same one twice on one page": {[]func() ([]groupedName, int, error){page(2, "a", "a")}, false},
	} {
		_, whole, err := readPages(func(n int) ([]groupedName, int, error) {
			if n > len(test.pages) {
				return nil, many + 2, nil
			}
			return test.pages[n-1]()
		}, "public", map[serviceID]bool{})
		if err != nil || whole != test.whole {
			t.Errorf("%s: whole %t, error %v", name, whole, err)
		}
	}
}
