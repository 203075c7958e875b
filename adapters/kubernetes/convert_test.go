package kubernetes

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protojson"

	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/plugintest"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// TestConfig shows every error of a configuration with its field.
func TestConfig(t *testing.T) {
	if err := (Config{}).Validate(); err != nil {
		t.Errorf("the minimal block: %v", err)
	}
	err := Config{
		Follow: "pods", KubeconfigFile: "k", Server: "kube", TokenFile: "t", Namespaces: []string{"a", "B", "a"}, Revision: "r",
		Select: plugin.Selection{Include: plugin.Globs{"["}}, Timeout: 1, MinShare: 2, TLS: plugin.TLS{CertFile: "c"},
	}.Validate()
	for _, field := range []string{"follow", "server", "token_file", "tls", "tls.cert_file", "namespaces[1]", "namespaces[2]", "select.include[0]", "revision", "timeout", "min_share"} {
		if !strings.Contains(fmt.Sprint(err), field+":") {
			t.Errorf("no error of %s in\n%v", field, err)
		}
	}
	if err := (Config{Context: "c"}).Validate(); !strings.Contains(fmt.Sprint(err), "kubeconfig_file") {
		t.Errorf("a context alone: %v", err)
	}
}

const kubeconfigText = `
current-context: one
contexts: [{name: one, context: {cluster: c, user: u}}, {name: two, context: {cluster: c, user: none}}, {name: three, context: {cluster: none, user: u}}]
clusters: [{name: c, cluster: {server: "https://kube.example.org:6443", certificate-authority: ca.crt, tls-server-name: kube}}]
users: [{name: u, user: USER}]
`

var kubeconfigs = []struct{ name, user, context, want string }{
	{"token", "{token: t}", "", "token t, CA /etc/kube/ca.crt"},
	{"token file", "{tokenFile: t}", "one", "token file /etc/kube/t"},
	{"certificate", "{client-certificate: c.crt, client-key: /k.key}", "", "certificate /etc/kube/c.crt /k.key"},
	{"data", "{client-certificate-data: " + base64.StdEncoding.EncodeToString([]byte("c")) + ", client-key-data: " + base64.StdEncoding.EncodeToString([]byte("k")) + "}", "", "data c k"},
	{"half a pair", "{client-certificate: c.crt}", "", "go together"},
	{"half of the data", "{client-key-data: aw==}", "", "go together"},
	{"no base64", "{client-key-data: '!'}", "", "no kubeconfig"},
	{"a program", "{exec: {command: aws}}", "", "service account"},
	{"a password", "{username: ann, password: secret}", "", "service account"},
	{"another context", "{}", "four", `no context "four"`},
	{"no user", "{}", "two", `no user "none"`},
	{"no cluster", "{}", "three", `no cluster "none"`},
}

// TestKubeconfig shows what is read of a kubeconfig.
func TestKubeconfig(t *testing.T) {
	for _, x := range kubeconfigs {
		k, err := parseKubeconfig([]byte(strings.Replace(kubeconfigText, "USER", x.user, 1)), x.context, "/etc/kube")
		got := fmt.Sprint(err)
		if err == nil {
			got = fmt.Sprintf("token %s, CA %s, token file %s, certificate %s %s, data %s %s", k.token, k.tls.CAFile, k.tokenFile, k.tls.CertFile, k.tls.KeyFile, k.cert, k.key)
			if k.server.Host != "kube.example.org:6443" || k.tls.ServerName != "kube" {
				t.Errorf("%s: server %s, name %q", x.name, k.server, k.tls.ServerName)
			}
		}
		if !strings.Contains(got, x.want) || strings.Contains(got, "secret") {
			t.Errorf("%s: %s; want %s", x.name, got, x.want)
		}
	}
	for text, want := range map[string]string{
		"": "current-context", "{": "no kubeconfig", "token: secret: more": "no kubeconfig",
		strings.Replace(kubeconfigText, "https://", "", 1):                                     "no URL",
		strings.Replace(kubeconfigText, "tls-server-name: kube", "proxy-url: 'http://p:1'", 1): "proxy-url",
	} {
		text = strings.Replace(text, "USER", "{}", 1)
		if _, err := parseKubeconfig([]byte(text), "", "/"); !strings.Contains(fmt.Sprint(err), want) || strings.Contains(fmt.Sprint(err), "secret") {
			t.Errorf("%q: error %v, want %s", text, err, want)
		}
	}
}

// FuzzKubeconfig shows that no file makes the adapter panic, and that what is
// accepted has a server.
func FuzzKubeconfig(f *testing.F) {
	for _, x := range kubeconfigs {
		f.Add([]byte(strings.Replace(kubeconfigText, "USER", x.user, 1)), x.context)
	}
	f.Fuzz(func(t *testing.T, text []byte, context string) {
		k, err := parseKubeconfig(text, context, "/etc")
		if (err == nil) != (k != nil) || k != nil && k.server.Host == "" {
			t.Errorf("%+v, error %v", k, err)
		}
		if k != nil {
			_ = k.files()
		}
	})
}

// TestEndpoints shows what EndpointSlices come to that a server has only at
// times.
func TestEndpoints(t *testing.T) {
	endpoint := func(name, family, endpoints string) string {
		return fmt.Sprintf(`{"metadata":{"namespace":"default","name":%q,"labels":{"kubernetes.io/service-name":"web"}},"addressType":%q,"ports":[{"name":"http","port":8080},{"port":53,"protocol":"UDP"}],"endpoints":[%s]}`, name, family, endpoints)
	}
	const ofPod = `{"addresses":[%q],"conditions":{"ready":%t,"terminating":%t},"targetRef":{"kind":"Pod","name":%q},"zone":"z","nodeName":"n"}`
	for what, x := range map[string]struct {
		service string
		slices  []string
		want    string
	}{
		"two families": {
			`"ipFamilies":["IPv6","IPv4"],`,
			[]string{endpoint("a", "IPv4", fmt.Sprintf(ofPod, "10.1.0.1", true, false, "p")), endpoint("b", "IPv6", fmt.Sprintf(ofPod, "2001:db8::1", true, false, "p"))},
			"p 2001:db8::1 passing false",
		},
		"another family than the Service has": {`"ipFamilies":["IPv6"],`, []string{endpoint("a", "IPv4", `{"addresses":["10.1.0.1"]}`)}, "10.1.0.1:8080 10.1.0.1 passing false"},
		"a name":                              {`"ipFamilies":["IPv4"],`, []string{endpoint("a", "FQDN", `{"addresses":["db.example.org"]}`)}, "db.example.org:8080 db.example.org passing false"},
		"in two slices": {
			"",
			[]string{endpoint("a", "IPv4", fmt.Sprintf(ofPod, "10.1.0.1", false, false, "p")), endpoint("b", "IPv4", fmt.Sprintf(ofPod, "10.1.0.1", true, false, "p")), endpoint("c", "IPv4", fmt.Sprintf(ofPod, "10.1.0.1", false, true, "p"))},
			"p 10.1.0.1 passing false",
		},
		"terminating":         {"", []string{endpoint("a", "IPv4", fmt.Sprintf(ofPod, "10.1.0.1", false, true, "p"))}, "p 10.1.0.1 critical true"},
		"nothing is said":     {"", []string{endpoint("a", "IPv4", `{"addresses":["10.1.0.1"]}`)}, "10.1.0.1:8080 10.1.0.1 passing false"},
		"without an address":  {"", []string{endpoint("a", "IPv4", `{}`)}, ""},
		"of no Service":       {"", []string{`{"metadata":{"namespace":"default","name":"a"},"endpoints":[{"addresses":["10.1.0.1"]}]}`}, ""},
		"without a namespace": {"", []string{`{"metadata":{"name":"a"},"endpoints":[{"addresses":["10.1.0.1"]}]}`}, ""},
	} {
		s := newState(&Adapter{})
		touched := map[registry.Key]bool{}
		for _, o := range x.slices {
			s.put("EndpointSlice", json.RawMessage(o), touched)
		}
		s.put("Service", json.RawMessage(`{"metadata":{"namespace":"default","name":"web"},"spec":{`+x.service+`"ports":[{"name":"http","port":80}]}}`), touched)
		l := s.all()
		if len(l.Services) != 1 {
			t.Fatalf("%s: %d services", what, len(l.Services))
		}
		var got []string
		for _, in := range l.Services[0].Instances {
			got = append(got, fmt.Sprintf("%s %s %s %t", in.ID, in.Address, in.Health, in.Disabled))
			if fmt.Sprint(in.Ports) != "[{http 8080 }]" {
				t.Errorf("%s: ports %v", what, in.Ports)
			}
		}
		if strings.Join(got, ", ") != x.want {
			t.Errorf("%s: %q, want %q", what, got, x.want)
		}
		if what == "without a namespace" && l.Doubt == nil {
			t.Errorf("%s: no doubt", what)
		}
	}
}

// TestKept shows that an object that cannot be read keeps what it said, and
// that this is listed until it can.
func TestKept(t *testing.T) {
	s := newState(&Adapter{})
	touched := map[registry.Key]bool{}
	s.put("Service", json.RawMessage(serviceJSON("web")), touched)
	s.put("EndpointSlice", json.RawMessage(sliceJSON("web-a", "10.1.0.1")), touched)
	put := func(object string) plugin.Listing {
		clear(touched)
		s.put("EndpointSlice", json.RawMessage(object), touched)
		return s.changed(maps.Keys(touched))
	}
	const id = "EndpointSlice default/web-a"
	if l := put(`{"metadata":{"namespace":"default","name":"web-a"},"endpoints":{}}`); len(l.Services) != 0 || len(l.Removed) != 0 || !strings.Contains(l.Problems[id], "kept") {
		t.Errorf("an object that is none: %+v", l)
	}
	if got := s.all(); len(got.Services[0].Instances) != 1 || got.Doubt == nil {
		t.Errorf("all: %+v", got)
	}
	if l := put(sliceJSON("web-a", "10.1.0.2")); len(l.Services) != 1 || l.Problems[id] != "" || !slices.Contains(slices.Collect(maps.Keys(l.Problems)), id) {
		t.Errorf("one that can be read: %+v", l)
	}
	if l := s.all(); l.Doubt != nil {
		t.Errorf("there is doubt still: %v", l.Doubt)
	}
}

// TestResource shows what an object of Istio is published as.
func TestResource(t *testing.T) {
	key := registry.Key{Group: "networking.istio.io/VirtualService", Namespace: "shop", Name: "web"}
	for what, x := range map[string]struct{ text, want, note string }{
		"whole":            {`{"spec":{"hosts":["a"],"http":[{"timeout":"5s"}]}}`, `{"hosts":["a"],"http":[{"timeout":"5s"}]}`, ""},
		"without a spec":   {`{}`, `{}`, ""},
		"a null":           {`{"spec":null}`, `{}`, ""},
		"of a newer Istio": {`{"spec":{"hosts":["a"],"new":{"b":1}}}`, `{"hosts":["a"]}`, `unknown field "new"`},
		"no spec":          {`{"spec":7}`, "", "kept"},
		"another type":     {`{"spec":{"hosts":7}}`, "", "kept"},
		"no object":        {`{`, "", "no object"},
	} {
		res, note := resource(key, x.text)
		if res.Metadata.Name != "shop/web" || !strings.Contains(note, x.note) || (note == "") != (x.note == "") {
			t.Errorf("%s: %v, note %q, want %q", what, res.Metadata, note, x.note)
		}
		body, err := res.Body.UnmarshalNew()
		if x.want == "" {
			if err == nil {
				t.Errorf("%s: the body can be read: %v", what, body)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", what, err)
			continue
		}
		if b, err := protojson.Marshal(body); err != nil || strings.ReplaceAll(string(b), " ", "") != x.want {
			t.Errorf("%s: %s, error %v, want %s", what, b, err, x.want)
		}
	}
	// What is wrong is listed, and no longer once it is right or gone.
	held := plugintest.NewCatalog()
	p := &publisher{Publisher: held}
	problem := func() (text string) {
		held.Look(func(h *plugintest.Held) { text = h.Problems[key.String()] })
		return text
	}
	set := func(text string) {
		p.Set(registry.Service{Key: key}, []registry.Instance{{ID: "web", Meta: map[string]string{inMeta: text}}})
	}
	for _, right := range []func(){func() { set(`{}`) }, func() { p.Remove(key) }} {
		set(`{"spec":7}`)
		if problem() == "" {
			t.Error("nothing is listed")
		}
		if right(); problem() != "" {
			t.Errorf("it is still listed: %s", problem())
		}
	}
}

// TestRevision shows how revisions are compared.
func TestRevision(t *testing.T) {
	for _, x := range []struct {
		was, is string
		back    bool
	}{{"9", "10", false}, {"10", "9", true}, {"9", "9", false}, {"a", "9", false}, {"9", "", false}} {
		if goesBack(x.was, x.is) != x.back {
			t.Errorf("from %q to %q: %t", x.was, x.is, !x.back)
		}
	}
	if !errors.Is(fmt.Errorf("list: %w", &apiError{410, "too old"}), errExpired) || errors.Is(&apiError{403, ""}, errExpired) {
		t.Error("410 is not taken for an expired revision, or something else is")
	}
}
