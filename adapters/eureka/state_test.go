package eureka

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// answerOf reads an answer as the adapter does.
func answerOf(t testing.TB, text string) (apps []application, hash string) {
	t.Helper()
	hash, err := readApplications(strings.NewReader(text), func(a *application) { apps = append(apps, *a) })
	if err != nil {
		t.Fatal(err)
	}
	return apps, hash
}

// springs is an answer as Spring Cloud's server writes it.
const springs = `{"applications":{"versions__delta":"1","apps__hashcode":"DOWN_1_OUT_OF_SERVICE_1_STARTING_1_UP_2_","application":[
{"name":"WEB","instance":[
 {"instanceId":"h1:web:80","hostName":"h1.example.org","app":"WEB","ipAddr":"10.0.0.1","status":"UP","overriddenStatus":"UNKNOWN",
  "port":{"$":80,"@enabled":"true"},"securePort":{"$":8443,"@enabled":"true"},"countryId":1,
  "dataCenterInfo":{"@class":"com.netflix.appinfo.AmazonInfo","name":"Amazon","metadata":{"instance-id":"i-1","availability-zone":"us-east-1c"}},
  "leaseInfo":{"renewalIntervalInSecs":30,"durationInSecs":90},"metadata":{"zone":"z1","gRPC_port":"9090"},
  "vipAddress":"web,www","secureVipAddress":"secure-web","asgName":"web-v1","lastUpdatedTimestamp":"1795326472082","actionType":"ADDED"},
 {"instanceId":"h2:web:80","hostName":"h2","ipAddr":"10.0.0.2","status":"OUT_OF_SERVICE","overriddenStatus":"OUT_OF_SERVICE",
  "port":{"$":80,"@enabled":"true"},"securePort":{"$":443,"@enabled":"false"},"dataCenterInfo":{"name":"MyOwn"},"metadata":{"gRPC_port":"none"},"vipAddress":"web"}]},
{"name":"DB","instance":[
 {"instanceId":"d1","hostName":"d1","ipAddr":"10.0.1.1","status":"DOWN","port":{"$":5432,"@enabled":"true"},"securePort":{"$":443,"@enabled":"false"},"vipAddress":"db"},
 {"instanceId":"d2","hostName":"d2","ipAddr":"10.0.1.2","status":"STARTING","port":{"$":5432,"@enabled":"true"},"securePort":{"$":443,"@enabled":"false"},"vipAddress":"db"},
 {"hostName":"d3","ipAddr":"10.0.1.3","status":"UP","port":{"$":1,"@enabled":"false"},"securePort":{"$":6432,"@enabled":"true"},"vipAddress":"web"}]}]}}`

// netflix is the same kind of answer as servers of old versions write it: one
// element in place of a list of one, numbers as text, the class of a map.
const netflix = `{"applications":{"versions__delta":1,"apps__hashcode":"UP_1_","application":
{"name":"WEB","instance":{"hostName":"h1","ipAddr":"10.0.0.1","status":"UP","port":{"$":"80","@enabled":true},"securePort":{"@enabled":"false","$":"443"},
"metadata":{"@class":"java.util.Collections$EmptyMap"},"vipAddress":"web","leaseInfo":null}}}}`

// listed is a whole list by service.
func listed(t testing.TB, c Config, text string) (map[string][]registry.Instance, *state) {
	t.Helper()
	s := newState(converter{c})
	apps, hash := answerOf(t, text)
	for i := range apps {
		s.add(&apps[i])
	}
	got := map[string][]registry.Instance{}
	for _, snap := range s.listing().Services {
		got[snap.Service.Key.String()] = snap.Instances
	}
	if s.hash() != hash {
		t.Errorf("the hash code is %q, the server's %q", s.hash(), hash)
	}
	return got, s
}

// TestConvert shows what each field becomes.
func TestConvert(t *testing.T) {
	h1 := registry.Instance{
		ID: "h1:web:80", Address: "10.0.0.1", Ports: []registry.Port{{Number: 80}, {Name: "https", Number: 8443, Protocol: "https"}},
		Meta: map[string]string{"zone": "z1", "gRPC_port": "9090"}, Health: registry.HealthPassing,
		Locality: registry.Locality{Region: "us-east-1", Zone: "us-east-1c"}, Cluster: "web-v1", Node: "h1.example.org",
	}
	h2 := registry.Instance{
		ID: "h2:web:80", Address: "10.0.0.2", Ports: []registry.Port{{Number: 80}}, Meta: map[string]string{"gRPC_port": "none"},
		Health: registry.HealthPassing, Disabled: true, Node: "h2",
	}
	d1 := registry.Instance{ID: "d1", Address: "10.0.1.1", Ports: []registry.Port{{Number: 5432}}, Health: registry.HealthCritical, Node: "d1"}
	d2 := registry.Instance{ID: "d2", Address: "10.0.1.2", Ports: []registry.Port{{Number: 5432}}, Health: registry.HealthCritical, Node: "d2"}
	d3 := registry.Instance{ID: "d3", Address: "10.0.1.3", Ports: []registry.Port{{Name: "https", Number: 6432, Protocol: "https"}}, Health: registry.HealthPassing, Node: "d3"}
	got, _ := listed(t, DefaultConfig, springs)
	if diff := gocmp.Diff(map[string][]registry.Instance{"WEB": {h1, h2}, "DB": {d1, d2, d3}}, got); diff != "" {
		t.Errorf("by application (-want +got):\n%s", diff)
	}

	c := DefaultConfig
	c.ServiceBy, c.Address = byVIP, addressHostname
	c.Ports = plugin.PortKeys{{Name: "grpc", Key: "gRPC_port", Protocol: "grpc"}}
	got, s := listed(t, c, springs)
	for i, in := range []*registry.Instance{&h1, &h2, &d1, &d2, &d3} {
		in.ID = []string{"WEB/", "WEB/", "DB/", "DB/", "DB/"}[i] + in.ID
		in.Address = in.Node
	}
	h1.Ports = append(h1.Ports, registry.Port{Name: "grpc", Number: 9090, Protocol: "grpc"})
	if diff := gocmp.Diff(map[string][]registry.Instance{"web": {d3, h1, h2}, "www": {h1}, "db": {d1, d2}}, got); diff != "" {
		t.Errorf("by VIP (-want +got):\n%s", diff)
	}
	if diff := gocmp.Diff(map[string]string{
		"service web": `instance WEB/h2:web:80 has "none" as gRPC_port in its metadata, which is not a port number, so it is served without the port "grpc": ` +
			"register it with 1 to 65535, or change config.ports",
	}, s.problems); diff != "" {
		t.Errorf("problems (-want +got):\n%s", diff)
	}

	c = DefaultConfig
	c.ServiceBy, c.Services.Include = bySecureVIP, []string{"secure-*"}
	got, _ = listed(t, c, springs)
	if len(got) != 1 || len(got["secure-web"]) != 1 || got["secure-web"][0].Ports[0].Number != 8443 {
		t.Errorf("by secure VIP: %+v", got)
	}

	got, _ = listed(t, DefaultConfig, netflix)
	if diff := gocmp.Diff(map[string][]registry.Instance{"WEB": {{
		ID: "h1", Address: "10.0.0.1", Ports: []registry.Port{{Number: 80}}, Meta: map[string]string{}, Health: registry.HealthPassing, Node: "h1",
	}}}, got); diff != "" {
		t.Errorf("an old server (-want +got):\n%s", diff)
	}
}

// TestLocality shows the region of availability zones.
func TestLocality(t *testing.T) {
	for zone, region := range map[string]string{
		"us-east-1c": "us-east-1", "us-gov-west-1a": "us-gov-west-1", "us-west-2-lax-1a": "us-west-2", "ap-southeast-2b": "ap-southeast-2", "rack 7": "",
	} {
		if got := awsRegion.FindString(zone); got != region {
			t.Errorf("%s is in %q, want %q", zone, got, region)
		}
	}
}

// TestNoAnswer shows answers that are none: each is an error that says what it
// is.
func TestNoAnswer(t *testing.T) {
	for text, want := range map[string]string{
		"":                                 "unexpected EOF",
		"<html>":                           "invalid character",
		"[]":                               "not a list of applications",
		"{}":                               "not a list of applications",
		`{"timestamp":"now","status":500}`: "not a list of applications",
		`{"applications":{}}`:              "not a list of applications",
		`{"applications":null}`:            "not a list of applications",
		`{"applications":{"apps__hashcode":"","application":7}}`:                             "not a list of applications",
		`{"applications":{"apps__hashcode":"","application":[7]}}`:                           "not a list of applications",
		`{"applications":{"apps__hashcode":"","application":[{"instance":[]}]}}`:             "has no name",
		`{"applications":{"apps__hashcode":"","application":[{"name":"A","instance":7}]}}`:   "not a list of applications",
		`{"applications":{"apps__hashcode":"","application":[{"name":"A","instance":[7]}]}}`: "cannot unmarshal",
		springs[:len(springs)-2]: "unexpected EOF",
		springs + "{":            "goes on",
		springs + `<html>`:       "goes on",
	} {
		_, err := readApplications(strings.NewReader(text), func(*application) {})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.80s: error %v, want one with %q", text, err, want)
		}
	}
	for n := range len(springs) {
		if _, err := readApplications(strings.NewReader(springs[:n]), func(*application) {}); err == nil {
			t.Fatalf("the first %d bytes count as an answer", n)
		}
	}
}

// TestChanges compares a random life, told by changes as a server tells them,
// with the whole list of each moment.
func TestChanges(t *testing.T) {
	for _, by := range []string{byApp, byVIP} {
		random := rand.New(rand.NewPCG(3, 4))
		c := DefaultConfig
		c.ServiceBy, c.Services.Exclude = by, []string{"APP-3", "vip-3"}
		type key struct{ app, id string }
		world := map[key]instance{}
		var recent []application // what a server remembers
		s := newState(converter{c})
		s.listing()
		known := map[string][]registry.Instance{}
		for step := range 3000 {
			for range random.IntN(3) {
				k := key{fmt.Sprint("APP-", random.IntN(4)), fmt.Sprint("i", random.IntN(6))}
				in, ok := world[k]
				if ok && random.IntN(3) == 0 {
					delete(world, k)
					in.ActionType = "DELETED"
				} else {
					in = instance{
						InstanceID: text(k.id), IPAddr: text(fmt.Sprint("10.0.0.", random.IntN(4))), Port: port{80, true}, ActionType: "MODIFIED",
						Status:     text([]string{"UP", "DOWN", "OUT_OF_SERVICE", "odd"}[random.IntN(4)]),
						VIPAddress: text(fmt.Sprintf("vip-%d, vip-%d", random.IntN(5), random.IntN(5))),
					}
					world[k] = in
				}
				recent = append(recent, application{k.app, []instance{in}})
			}
			recent = recent[max(0, len(recent)-20):]
			l := s.apply(recent)
			for _, snap := range l.Services {
				known[snap.Service.Key.Name] = snap.Instances
			}
			for _, key := range l.Removed {
				delete(known, key.Name)
			}
			whole := newState(converter{c})
			for k, in := range world {
				whole.add(&application{k.app, []instance{in}})
			}
			want := map[string][]registry.Instance{}
			for _, snap := range whole.listing().Services {
				want[snap.Service.Key.Name] = snap.Instances
			}
			if !reflect.DeepEqual(want, known) { // much faster than the difference
				t.Fatalf("by %s, step %d (-want +got):\n%s", by, step, gocmp.Diff(want, known))
			}
			if s.hash() != whole.hash() {
				t.Fatalf("by %s, step %d: hash %q, want %q", by, step, s.hash(), whole.hash())
			}
			if again := s.apply(nil); len(again.Services)+len(again.Removed) > 0 {
				t.Fatalf("by %s, step %d: no change comes to %+v", by, step, again)
			}
		}
	}
}

// TestRepeated shows that changes that are known already come to nothing, and
// that a list that has an instance twice holds it once.
func TestRepeated(t *testing.T) {
	_, s := listed(t, DefaultConfig, springs)
	apps, _ := answerOf(t, springs)
	if l := s.apply(apps); len(l.Services)+len(l.Removed) > 0 {
		t.Errorf("what is known comes to %+v", l)
	}
	twice := strings.Replace(netflix, `"instance":{`, `"instance":[{"hostName":"h1","ipAddr":"10.9.9.9","status":"DOWN","vipAddress":"web"},{`, 1)
	twice = strings.Replace(twice, `null}}}}`, `null}]}}}`, 1)
	got, _ := listed(t, DefaultConfig, twice)
	if len(got["WEB"]) != 1 || got["WEB"][0].Address != "10.0.0.1" {
		t.Errorf("an instance that is there twice: %+v", got)
	}
	nameless := strings.Replace(netflix, `"hostName":"h1",`, "", 1)
	s = newState(converter{DefaultConfig})
	apps, _ = answerOf(t, nameless)
	s.add(&apps[0])
	if s.problems["application WEB"] == "" {
		t.Errorf("an instance without a name is not listed: %v", s.problems)
	}
}

// FuzzAnswer shows that no answer makes the adapter panic, and that what it
// makes of one keeps the rules of the catalog: IDs sorted, each once, and the
// same from a list as from changes.
func FuzzAnswer(f *testing.F) {
	f.Add(springs, netflix)
	f.Add(netflix, springs)
	f.Add(`{"applications":{"apps__hashcode":"","application":[]}}`, springs[:100])
	f.Add(`{"applications":{"apps__hashcode":7,"application":[{"name":"A","instance":[{"instanceId":{"a":[1]},"port":"x","metadata":{"a":null}}]}]}}`, "{}")
	f.Add(strings.Repeat(`{"applications":`, 9000)+"1"+strings.Repeat("}", 9000), `{"applications":{"application":[{"name":"A","instance":[{"metadata":`+strings.Repeat(`{"a":`, 9000)+"1"+strings.Repeat("}", 9000)+`}]}]}}`)
	f.Fuzz(func(t *testing.T, first, second string) {
		for _, by := range []string{byApp, byVIP, bySecureVIP} {
			c := DefaultConfig
			c.ServiceBy, c.Ports = by, plugin.PortKeys{{Name: "grpc", Key: "a"}}
			s := newState(converter{c})
			if _, err := readApplications(strings.NewReader(first), s.add); err != nil {
				s = newState(converter{c})
			}
			check := func(instances []registry.Instance) {
				if !slices.IsSortedFunc(instances, func(a, b registry.Instance) int { return cmp.Compare(a.ID, b.ID) }) {
					t.Errorf("not sorted: %+v", instances)
				}
				for i := range instances {
					if i > 0 && instances[i].ID == instances[i-1].ID {
						t.Errorf("twice: %q", instances[i].ID)
					}
				}
			}
			for _, snap := range s.listing().Services {
				check(snap.Instances)
			}
			var changes []application
			if _, err := readApplications(strings.NewReader(second), func(a *application) { changes = append(changes, *a) }); err != nil {
				continue
			}
			for _, snap := range s.apply(changes).Services {
				check(snap.Instances)
			}
			n := 0
			for _, count := range s.counts {
				n += count
			}
			if n != len(s.records) {
				t.Errorf("%d instances are counted, there are %d: %v", n, len(s.records), slices.Collect(maps.Keys(s.records)))
			}
		}
	})
}

// BenchmarkList reads a list of 10,000 services of ten instances.
func BenchmarkList(b *testing.B) {
	var apps strings.Builder
	apps.WriteString(`{"applications":{"versions__delta":"1","application":[`)
	for i := range 10_000 {
		if i > 0 {
			apps.WriteByte(',')
		}
		fmt.Fprintf(&apps, `{"name":"APP-%d","instance":[`, i)
		for j := range 10 {
			if j > 0 {
				apps.WriteByte(',')
			}
			fmt.Fprintf(&apps, `{"instanceId":"h%d:app-%d:80","hostName":"h%[1]d.example.org","app":"APP-%[2]d","ipAddr":"10.%d.%d.%[1]d","status":"UP","overriddenStatus":"UNKNOWN","port":{"$":80,"@enabled":"true"},"securePort":{"$":443,"@enabled":"false"},"countryId":1,"dataCenterInfo":{"@class":"com.netflix.appinfo.InstanceInfo$DefaultDataCenterInfo","name":"MyOwn"},"leaseInfo":{"renewalIntervalInSecs":30,"durationInSecs":90,"registrationTimestamp":1795326471958,"lastRenewalTimestamp":1795326563465,"evictionTimestamp":0,"serviceUpTimestamp":1795326471958},"metadata":{"zone":"z1","management.port":"8081"},"homePageUrl":"http://h1/","vipAddress":"app-%[2]d","secureVipAddress":"app-%[2]d","isCoordinatingDiscoveryServer":"false","lastUpdatedTimestamp":"1795326473466","lastDirtyTimestamp":"1795326471871","actionType":"MODIFIED"}`, j, i, i/256, i%256)
		}
		apps.WriteString(`]}`)
	}
	apps.WriteString(`],"apps__hashcode":"UP_100000_"}}`)
	b.SetBytes(int64(apps.Len()))
	b.ReportAllocs()
	for b.Loop() {
		s := newState(converter{DefaultConfig})
		hash, err := readApplications(io.Reader(strings.NewReader(apps.String())), s.add)
		if l := s.listing(); err != nil || len(l.Services) != 10_000 || s.hash() != hash {
			b.Fatal(err, len(l.Services), hash)
		}
	}
}
