package etcd

import (
	"fmt"
	"log/slog"
	"maps"
	"strings"
	"testing"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/protobuf/proto"

	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/plugintest"
)

// parseCases are keys and values of each layout, and what they become: the
// service, its instances, a note and an error, as far as they are not empty.
var parseCases = []struct{ layout, key, value, want string }{
	{layoutJSON, "web/1", `{"address":"10.0.0.1","port":80}`, `web {1 10.0.0.1 [{ 80 }] map[] health unknown}`},
	{layoutJSON, "shop/web/1", `{"address":"10.0.0.1","health":"passing"}`, `shop/web {1 10.0.0.1 [] map[] health passing}`},
	{
		layoutJSON, "web/1", `{"address":"h.example.org","ports":[{"name":"a","number":1,"protocol":"http"},{"number":2}],"meta":{"a":1,"b":true,"c":null,"d":[1],"e":"\u00e9"}}`,
		`web {1 h.example.org [{a 1 http} { 2 }] map[a:1 b:true c: d:[1] e:é] health unknown}`,
	},
	{layoutJSON, "web/1", `{}`, `web {1  [] map[] health unknown}`}, // translate lists it
	{layoutJSON, "web/1", `{"address":"a","port":1,"ports":[]}`, `web error the value has port and ports; keep one of them`},
	{layoutJSON, "web/1", `{"address":"a","weight":-1}`, `web error weight must not be negative, but is -1`},
	{layoutJSON, "web/1", `{"address":"a","health":"up"}`, `web error health must be passing, warning, critical or unknown, not "up"`},
	{layoutJSON, "web/1", `{"address":"a","locality":"/b"}`, `web error locality must be region, region/zone or region/zone/subzone, not "/b"`},
	{layoutJSON, "web/1", `10.0.0.1:80`, `web error the value is not a JSON object`},
	{layoutJSON, "web/1", ``, `web error the value is not a JSON object`},
	{layoutJSON, "web/1", `null`, `web error the value is not a JSON object`},
	{layoutJSON, "web/1", `{"address":1}`, `web error the value is not as the layout has it: json: cannot unmarshal number into Go struct field jsonInstance.address of type string`},
	{layoutJSON, "web", `{}`, ` error ` + errNoService.Error()},
	{layoutJSON, "web/", `{}`, ` error ` + errNoService.Error()},
	{layoutJSON, "/1", `{}`, ` error ` + errNoService.Error()},

	{
		layoutKratos, "user/id-1", `{"id":"id-1","name":"user","version":"v1","metadata":{"a":"b"},"endpoints":["grpc://10.0.0.1:9000","http://10.0.0.1:8000"]}`,
		`user {id-1 10.0.0.1 [{grpc 9000 grpc} {http 8000 http}] map[a:b version:v1] health unknown}`,
	},
	{
		layoutKratos, "a/b/c/d", `{"id":"c/d","name":"a/b","version":"","metadata":null,"endpoints":["grpcs://[::1]:1","grpc://[::1]:2?isSecure=true","grpc://[::1]:3","grpc://[::1]:3"]}`,
		`a/b {c/d ::1 [{grpcs 1 grpcs} {grpc 2 grpcs} {grpc-3 3 grpc}] map[] health unknown}`,
	},
	{layoutKratos, "user/1", `{"name":"user","metadata":{"version":"m"},"version":"v","endpoints":[]}`, `user {1  [] map[version:m] health unknown}`},
	{
		layoutKratos, "user/1", `{"name":"user","endpoints":["http://10.0.0.1:80","grpc://10.0.0.2:90"]}`,
		`user {1 10.0.0.1 [{http 80 http}] map[] health unknown} note endpoint "grpc://10.0.0.2:90" has another host than the first one, "10.0.0.1", and is left out`,
	},
	{layoutKratos, "user/1", `{"name":"user","endpoints":["http://10.0.0.1"]}`, `user {1  [] map[] health unknown} note endpoint "http://10.0.0.1" has no port, and is left out`},
	{layoutKratos, "user/1", `{"name":"user","endpoints":[":"]}`, `user {1  [] map[] health unknown} note endpoint ":" is not a URL with a host, and is left out`},
	{layoutKratos, "user/1", `{"name":"other"}`, `user error the value names the service "other", and the key another`},
	{layoutKratos, "1", `{"name":""}`, ` error the value names the service "", and the key another`},

	{
		layoutGoMicro, "go.micro.srv/srv-1", `{"name":"go.micro.srv","version":"latest","metadata":{"t":"1","p":"service"},"endpoints":[{"name":"x"}],"nodes":[{"id":"srv-1","address":"10.0.0.1:80","metadata":{"p":"node"}}]}`,
		`go.micro.srv {srv-1 10.0.0.1 [{ 80 }] map[p:node t:1 version:latest] health unknown}`,
	},
	{
		layoutGoMicro, "a-b/1", `{"name":"a/b","nodes":[{"id":"1","address":"[::1]:80"},{"id":"2","address":"host"}]}`,
		`a/b {1 ::1 [{ 80 }] map[] health unknown} {1/1 host [] map[] health unknown}`,
	},
	{layoutGoMicro, "a/1", `{"name":"a","nodes":null}`, `a`},
	{layoutGoMicro, "a/1", `{"name":"b"}`, `a error the value names the service "b", and the key another`},
	{layoutGoMicro, "1", `{"name":"b"}`, ` error ` + errNoService.Error()},
	{layoutGoMicro, "a/1", `[]`, `a error the value is not a JSON object`},

	{layoutGRPC, "foo/bar/10.0.0.1:80", `{"Op":0,"Addr":"10.0.0.1:80","Metadata":null}`, `foo/bar {10.0.0.1:80 10.0.0.1 [{ 80 grpc}] map[] health unknown}`},
	{layoutGRPC, "foo/1", `{"Op":0,"Addr":"10.0.0.1:http","Metadata":"text"}`, `foo {1 10.0.0.1 [] map[metadata:text] health unknown}`},
	{layoutGRPC, "foo/1", `{"addr":"a:1","metadata":{"weight":3,"x":{"y":1}}}`, `foo {1 a [{ 1 grpc}] map[weight:3 x:{"y":1}] health unknown}`},
	{layoutGRPC, "foo/1", `{"Op":1,"Addr":"a:1"}`, `foo`},
	{layoutGRPC, "foo/1", `{"Op":0}`, `foo error the value has no Addr`},
	{layoutGRPC, "foo/1", `{"Op":"x"}`, `foo error the value is not as the layout has it: json: cannot unmarshal string into Go struct field grpcUpdate.Op of type int`},
	{layoutGRPC, "foo", `{"Addr":"a:1"}`, ` error ` + errNoService.Error()},
}

// TestParse shows what keys and values of each layout become.
func TestParse(t *testing.T) {
	for _, c := range parseCases {
		service, instances, note, err := layouts[c.layout].parse(c.key, []byte(c.value))
		got := service
		for _, i := range instances {
			got += fmt.Sprintf(" {%s %s %v %v health %v}", i.ID, i.Address, i.Ports, i.Meta, i.Health)
		}
		if note != "" {
			got += " note " + note
		}
		if err != nil {
			got += " error " + err.Error()
		}
		if got != c.want {
			t.Errorf("%s %s %s\n got %s\nwant %s", c.layout, c.key, c.value, got, c.want)
		}
	}
	if _, _, _, err := parseJSON("a/b", []byte(`{"address":"`+strings.Repeat("a", maxValue)+`"}`)); err == nil || !strings.Contains(err.Error(), "more than") {
		t.Errorf("a large value: %v", err)
	}
}

// TestUnreadable shows that a value that cannot be read leaves what its key
// said before, that its problem is listed once for each service, and that it
// ends with the key.
func TestUnreadable(t *testing.T) {
	s, touched := newState(layouts[layoutJSON], plugin.Selection{}), map[string]bool{}
	put := func(key, value string) { s.put(key, []byte(value), s.keys[key], touched) }
	put("web/1", `{"address":"a"}`)
	put("web/1", `{`)
	put("web/2", `{`)
	if got := s.listed("web"); len(got) != 1 || got[0].Address != "a" {
		t.Errorf("%v", got)
	}
	if got := s.problem("web"); !strings.HasPrefix(got, `key "web/1": `) || !strings.Contains(got, "is kept") || !strings.HasSuffix(got, "(and 1 more like it)") {
		t.Errorf("problem: %s", got)
	}
	put("\xff/1", `{}`)
	if got := s.problem(""); !strings.Contains(got, "UTF-8") {
		t.Errorf("problem: %s", got)
	}
	for _, key := range []string{"web/1", "web/2", "\xff/1", "never"} {
		s.remove(key, touched)
	}
	if len(s.keys)+len(s.services) != 0 || !maps.Equal(touched, map[string]bool{"web": true, "": true}) {
		t.Errorf("left: %v %v, touched %v", s.keys, s.services, touched)
	}
}

// FuzzValue shows that no key and value make a layout panic, and what holds for
// what is read.
func FuzzValue(f *testing.F) {
	for _, c := range parseCases {
		f.Add(c.key, []byte(c.value))
	}
	f.Add("/a/b", []byte(strings.Repeat(`{"Metadata":`, 9000)+"1"+strings.Repeat("}", 9000)))
	f.Fuzz(func(t *testing.T, key string, value []byte) {
		for name, l := range layouts {
			service, instances, _, err := l.parse(key, value)
			if err != nil && len(instances) > 0 {
				t.Errorf("%s: %v, and yet %v", name, err, instances)
			}
			if len(instances) > 0 && service == "" {
				t.Errorf("%s: instances of no service: %v", name, instances)
			}
			for i, in := range instances {
				if in.ID == "" || i > 0 && in.ID == instances[i-1].ID {
					t.Errorf("%s: ID %q", name, in.ID)
				}
			}
		}
	})
}

// FuzzMessages shows that no message of a server makes the adapter panic: pages
// of a listing, then messages of a watch. What is reported is what there is.
func FuzzMessages(f *testing.F) {
	kv := func(key, value string) *mvccpb.KeyValue {
		return &mvccpb.KeyValue{Key: []byte(key), Value: []byte(value)}
	}
	add := func(page, message proto.Message) {
		a, err := proto.Marshal(page)
		if err != nil {
			f.Fatal(err)
		}
		b, err := proto.Marshal(message)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(a, b)
	}
	header := &etcdserverpb.ResponseHeader{ClusterId: 1, Revision: 5}
	add(&etcdserverpb.RangeResponse{Header: header, Kvs: []*mvccpb.KeyValue{kv("/services/web/1", `{"address":"a"}`), kv("/services/web/2", `{`)}},
		&etcdserverpb.WatchResponse{Header: header, Events: []*mvccpb.Event{
			{Type: mvccpb.Event_PUT, Kv: kv("/services/web/1", `{"address":"b"}`)},
			{Type: mvccpb.Event_DELETE, Kv: kv("/services/web/2", "")},
			{Kv: kv("x", "")},
			{},
		}})
	add(&etcdserverpb.RangeResponse{More: true}, &etcdserverpb.WatchResponse{Canceled: true, CancelReason: "x", CompactRevision: 3})
	f.Fuzz(func(t *testing.T, page, message []byte) {
		var p etcdserverpb.RangeResponse
		var m etcdserverpb.WatchResponse
		if proto.Unmarshal(page, &p) != nil || proto.Unmarshal(message, &m) != nil {
			return
		}
		c := DefaultConfig
		c.Endpoints = []string{"http://a"}
		a := &Adapter{config: c, prefix: "/services/", layout: layouts[layoutJSON], env: plugin.Env{Log: slog.New(slog.DiscardHandler)}}
		fl := &follower{Adapter: a, catalog: plugintest.NewCatalog(), state: newState(a.layout, c.Services)}
		s, now := &session{}, newState(a.layout, c.Services)
		if _, err := s.take((*clientv3.GetResponse)(&p), "/services/", "/services/", fl.state, now); err != nil {
			return
		}
		s.cluster, s.revision = p.Header.GetClusterId(), p.Header.GetRevision()
		told := map[string]int{} // instances by service
		take := func(l plugin.Listing) {
			for _, s := range l.Services {
				told[s.Service.Key.Name] = len(s.Instances)
			}
			for _, key := range l.Removed {
				delete(told, key.Name)
			}
		}
		take(fl.accept(&listing{s.cluster, s.revision, now}))
		if s.check(&m) == nil {
			take(fl.apply(m.Events))
		}
		is, keys := map[string]int{}, 0
		for name, of := range fl.state.services {
			keys += len(of)
			if n := len(fl.state.listed(name)); n > 0 {
				is[name] = n
			}
		}
		if !maps.Equal(told, is) || keys != len(fl.state.keys) {
			t.Errorf("told of %v, there is %v; %d keys, %d of services", told, is, len(fl.state.keys), keys)
		}
	})
}
