package kubernetes

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protojson"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"

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
	if err := (Config{KubeconfigFile: "k", Exec: "aws"}).Validate(); !strings.Contains(fmt.Sprint(err), "exec: ") {
		t.Errorf("a program without its path: %v", err)
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
	{"token", "{token: t}", "", "token t, CA DIR/ca.crt"},
	{"token file", "{tokenFile: t}", "one", "token file DIR/t"},
	{"certificate", "{client-certificate: c.crt, client-key: DIR/k.key}", "", "certificate DIR/c.crt DIR/k.key"},
	{"data", "{client-certificate-data: " + base64.StdEncoding.EncodeToString([]byte("c")) + ", client-key-data: " + base64.StdEncoding.EncodeToString([]byte("k")) + "}", "", "data c k"},
	{"half a pair", "{client-certificate: c.crt}", "", "client-key"},
	{"half of the data", "{client-key-data: aw==}", "", "go together"},
	{"no base64", "{client-key-data: '!'}", "", "not a kubeconfig"},
	{"a password", "{username: ann, password: secret}", "", "service account"},
	{"another context", "{}", "four", "four"},
	{"no user", "{}", "two", `none`},
	{"no cluster", "{}", "three", `none`},
}

// kubeconfigOf returns the text of a kubeconfig in a directory that has the
// files it names.
func kubeconfigOf(t testing.TB, user string) (text, file string) {
	t.Helper()
	dir := t.TempDir()
	for _, name := range []string{"ca.crt", "c.crt", "k.key", "t"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(name), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return strings.Replace(kubeconfigText, "USER", strings.ReplaceAll(user, "DIR", dir), 1), filepath.Join(dir, "kubeconfig")
}

// TestKubeconfig shows what is read of a kubeconfig.
func TestKubeconfig(t *testing.T) {
	for _, x := range kubeconfigs {
		text, file := kubeconfigOf(t, x.user)
		k, err := parseKubeconfig([]byte(text), x.context, file)
		got := fmt.Sprint(err)
		if err == nil {
			c := k.config
			got = fmt.Sprintf("token %s, CA %s, token file %s, certificate %s %s, data %s %s", c.BearerToken, k.tls.CAFile, c.BearerTokenFile, k.tls.CertFile, k.tls.KeyFile, c.CertData, c.KeyData)
			if k.url().Host != "kube.example.org:6443" || k.tls.ServerName != "kube" {
				t.Errorf("%s: server %s, name %q", x.name, k.url(), k.tls.ServerName)
			}
		}
		if got = strings.ReplaceAll(got, filepath.Dir(file), "DIR"); !strings.Contains(got, x.want) || strings.Contains(got, "secret") {
			t.Errorf("%s: %s; want %s", x.name, got, x.want)
		}
	}
	for text, want := range map[string]string{
		"": "current-context", "{": "not a kubeconfig", "token: secret: more": "not a kubeconfig",
		strings.Replace(kubeconfigText, "https://", "", 1): "not a URL",
	} {
		_, file := kubeconfigOf(t, "")
		text = strings.Replace(text, "USER", "{}", 1)
		if _, err := parseKubeconfig([]byte(text), "", file); !strings.Contains(fmt.Sprint(err), want) || strings.Contains(fmt.Sprint(err), "secret") {
			t.Errorf("%q: error %v, want %s", text, err, want)
		}
	}
	text, file := kubeconfigOf(t, "{}")
	k, err := parseKubeconfig([]byte(strings.Replace(text, "tls-server-name: kube", "proxy-url: 'http://p:1080'", 1)), "", file)
	if err != nil || fmt.Sprint(k.access().Ports) != "[6443 1080]" {
		t.Errorf("with a proxy: %+v, error %v", k, err)
	}
}

// FuzzKubeconfig shows that no file makes the adapter panic, and that what is
// accepted has a server.
func FuzzKubeconfig(f *testing.F) {
	for _, x := range kubeconfigs {
		text, _ := kubeconfigOf(f, x.user)
		f.Add([]byte(text), x.context)
	}
	f.Add([]byte("users: &a [*a]\nclusters: [*a]\n"), "")
	f.Add([]byte("users: "+strings.Repeat("[", 9000)), "")
	f.Fuzz(func(t *testing.T, text []byte, context string) {
		k, err := parseKubeconfig(text, context, "/dev/null/kubeconfig")
		if (err == nil) != (k != nil) || k != nil && k.url().Host == "" {
			t.Errorf("%+v, error %v", k, err)
		}
		if k != nil {
			_ = k.access()
		}
	})
}

// objectOf returns an object as it arrives, read.
func objectOf(t *testing.T, f follower, kind, text string) *object {
	t.Helper()
	o := &object{}
	if err := json.Unmarshal([]byte(text), o); err != nil {
		t.Fatal(err)
	}
	f.read(kind, o)
	return o
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
		s := newState(&Adapter{}, nil)
		touched := map[registry.Key]bool{}
		for _, o := range x.slices {
			s.put("EndpointSlice", objectOf(t, s, "EndpointSlice", o), touched)
		}
		s.put("Service", objectOf(t, s, "Service", `{"metadata":{"namespace":"default","name":"web"},"spec":{`+x.service+`"ports":[{"name":"http","port":80}]}}`), touched)
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
	s := newState(&Adapter{}, nil)
	touched := map[registry.Key]bool{}
	s.put("Service", objectOf(t, s, "Service", serviceJSON("web")), touched)
	s.put("EndpointSlice", objectOf(t, s, "EndpointSlice", sliceJSON("web-a", "10.1.0.1")), touched)
	put := func(object string) plugin.Listing {
		clear(touched)
		s.put("EndpointSlice", objectOf(t, s, "EndpointSlice", object), touched)
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
		"no object":        {`{`, "", "not an object"},
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
	if !expired(fmt.Errorf("list: %w", apierrors.NewResourceExpired("too old"))) || expired(apierrors.NewForbidden(schema.GroupResource{}, "", nil)) {
		t.Error("410 is not taken for an expired revision, or something else is")
	}
}
