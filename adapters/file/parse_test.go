package file

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/rogpeppe/go-internal/txtar"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
)

var update = flag.Bool("update", false, "write the golden files")

// render shows what a file holds.
func render(t *testing.T, c *content) string {
	t.Helper()
	var b bytes.Buffer
	for _, svc := range c.services {
		fmt.Fprintf(&b, "service %s (line %d)\n", svc.Key, svc.line)
		line := func(v any) {
			enc := json.NewEncoder(&b)
			if err := enc.Encode(v); err != nil {
				t.Fatal(err)
			}
		}
		line(svc.Service)
		for _, i := range svc.instances {
			line(i)
		}
	}
	for _, res := range c.resources {
		fmt.Fprintf(&b, "resource %s %s (line %d)\n", res.id.collection, res.id.name, res.line)
		raw, err := protojson.Marshal(res.res)
		if err != nil {
			t.Fatal(err)
		}
		// protojson varies its spaces on purpose.
		if err := json.Indent(&b, raw, "", "  "); err != nil {
			t.Fatal(err)
		}
		b.WriteByte('\n')
	}
	return b.String()
}

func TestParseGolden(t *testing.T) {
	files, err := filepath.Glob("testdata/parse/*.txtar")
	if err != nil || len(files) == 0 {
		t.Fatalf("no goldens: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txtar"), func(t *testing.T) {
			ar, err := txtar.ParseFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if len(ar.Files) != 2 || ar.Files[0].Name != "in.yaml" || ar.Files[1].Name != "out" {
				t.Fatal("the archive holds something else than in.yaml and out")
			}
			var got string
			if c, err := parse(ar.Files[0].Data, "default"); err != nil {
				got = "error: " + strings.ReplaceAll(err.Error(), "; ", ";\n  ") + "\n"
			} else {
				got = render(t, c)
			}
			if *update {
				ar.Files[1].Data = []byte(got)
				if err := os.WriteFile(file, txtar.Format(ar), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			if diff := cmp.Diff(string(ar.Files[1].Data), got); diff != "" {
				t.Errorf("out (-want +got; -update writes it):\n%s", diff)
			}
		})
	}
}

const entry = "apiVersion: networking.istio.io/v1\nkind: ServiceEntry\nmetadata: {name: a}\nspec:\n"

// TestParseErrors shows that each error gives its line, what is wrong, and the
// cure, and that one look finds all of them.
func TestParseErrors(t *testing.T) {
	for _, tt := range []struct{ name, in, want string }{
		{"no YAML", "services:\n- name: web\n  tags: [a\n", `a.yaml:3: did not find expected ',' or ']'`},
		{"no YAML in the first line", "services: [\n", `a.yaml:2: did not find expected node content`},
		{"no YAML by its words", "services:\n- name: web: api\n", `a.yaml:2: mapping values are not allowed in this context`},
		{"no YAML by the words of its first line", "services: a: b\n", `a.yaml:1: mapping values are not allowed in this context`},
		{"control character", "services: \x01\n", `a.yaml: control characters are not allowed`},
		{"text", "hello\n", `a.yaml:1: a document must be a mapping with services, or with apiVersion and kind, not "hello"`},
		{"empty mapping", "{}\n", `a.yaml:1: a document must have services, or apiVersion and kind`},
		{"unknown document", "---\nservice: []\n", `a.yaml:2: unknown field "service" of a document; did you mean services?`},
		{"second document", "services: []\n---\n# one\nservices:\n- nam: web\n", `a.yaml:5: unknown field "nam" of a service; did you mean name?; a.yaml:5: the service has no name`},
		{
			"unknown fields", "services:\n- name: web\n  instances:\n  - address: 10.0.0.1\n    adress: 10.0.0.2\n    port: 80\n    zzz: 1\n",
			`a.yaml:5: unknown field "adress" of an instance; did you mean address?; ` +
				`a.yaml:7: unknown field "zzz" of an instance; it may have id, address, port, ports, meta, tags, weight, health, disabled, locality, cluster, node`,
		},
		{"key twice", "services:\n- name: web\n  name: api\n", `a.yaml:3: "name" is there twice; the first is in line 2`},
		{"key that is a list", "services:\n- name: web\n  meta: {[a]: b}\n", `a.yaml:3: a key must be a plain word`},
		{"no name", "services:\n- {}\n", `a.yaml:2: the service has no name`},
		{"empty name", "services:\n- name: ''\n", `a.yaml:2: name is empty; a.yaml:2: the service has no name`},
		{
			"service twice", "services:\n- name: web\n- {name: web, group: a}\n---\nservices: [{name: web}]\n",
			`a.yaml:5: service web is defined in line 2 already; make one of them`,
		},
		{"services no list", "services: {name: web}\n", `a.yaml:1: services must be a list, not a mapping`},
		{"name no text", "services:\n- name: [web]\n", `a.yaml:2: name must be text, not a list; a.yaml:2: the service has no name`},
		{"tag", "services:\n- name: !secret web\n", `a.yaml:2: name: the tag "!secret" means nothing here; leave it out; a.yaml:2: the service has no name`},
		{
			"instance values", "services:\n- name: web\n  instances:\n  - address: a\n    port: 65536\n    weight: -1\n    health: fine\n    disabled: nope\n    locality: a/b/c/d\n    meta: [a]\n    tags: {a: b}\n",
			`a.yaml:6: weight must be a number that is not negative, not "-1"; ` +
				`a.yaml:7: health must be passing, warning, critical or unknown, not "fine"; ` +
				`a.yaml:8: disabled must be true or false, not "nope"; ` +
				`a.yaml:9: locality must be region, region/zone or region/zone/subzone, not "a/b/c/d"; ` +
				`a.yaml:10: meta must be a mapping, not a list; ` +
				`a.yaml:11: tags must be a list, not a mapping; ` +
				`a.yaml:5: port must be a number from 1 to 65535, not "65536"`,
		},
		{"weight not a number", "services: [{name: a, instances: [{address: b, port: 1, weight: .nan}]}]", `a.yaml:1: weight must be a number that is not negative, not ".nan"`},
		{"no address", "services:\n- name: web\n  instances:\n  - port: 80\n", `a.yaml:4: the instance has no address`},
		{"no port", "services:\n- name: web\n  instances:\n  - address: 10.0.0.1\n", `a.yaml:4: the instance has no port, and the service has none that it could take over`},
		{"port and ports", "services:\n- name: web\n  instances:\n  - address: a\n    port: 1\n    ports: [2]\n", `a.yaml:5: an instance has port or ports, not both`},
		{"port without number", "services:\n- name: web\n  ports:\n  - name: http\n", `a.yaml:4: the port has no number`},
		{"ports of one name", "services:\n- name: web\n  ports:\n  - 80\n  - 81\n", `a.yaml:5: the port in line 4 has the name "" already; give each port a name of its own`},
		{
			"instance twice", "services:\n- name: web\n  instances:\n  - {address: a, port: 1}\n  - {address: a, port: 1}\n",
			`a.yaml:5: instance "a:1" of service web is defined in line 4 already; give each an id of its own`,
		},
		{"merge of text", "services:\n- name: web\n  meta:\n    <<: text\n", `a.yaml:4: << takes a mapping, or a list of them`},
		{"cycle", "services:\n- name: web\n  meta: &m\n    <<: *m\n", `a.yaml:3: values are nested deeper than 100`},
		{"many errors", "services:\n" + strings.Repeat("- {}\n", 15), func() string {
			var parts []string
			for i := range maxFindings {
				parts = append(parts, fmt.Sprintf("a.yaml:%d: the service has no name", i+2))
			}
			return strings.Join(parts, "; ") + "; and 5 more"
		}()},

		{"kind of Kubernetes", "apiVersion: v1\nkind: Service\n", `a.yaml:2: apiVersion "v1", kind "Service" is nothing that can be published; it may be one of ` +
			`networking.istio.io/DestinationRule, networking.istio.io/EnvoyFilter, networking.istio.io/Gateway, networking.istio.io/ProxyConfig, ` +
			`networking.istio.io/ServiceEntry, networking.istio.io/Sidecar, networking.istio.io/VirtualService, networking.istio.io/WorkloadEntry, ` +
			`networking.istio.io/WorkloadGroup, security.istio.io/AuthorizationPolicy, security.istio.io/PeerAuthentication, security.istio.io/RequestAuthentication`},
		{
			"unknown kind", "apiVersion: security.istio.io/v1\nkind: Policy\n",
			`a.yaml:2: apiVersion "security.istio.io/v1", kind "Policy" is nothing that can be published; kinds of this group are AuthorizationPolicy, PeerAuthentication, RequestAuthentication`,
		},
		{
			"version", "apiVersion: networking.istio.io/1\nkind: Gateway\n",
			`a.yaml:2: apiVersion "networking.istio.io/1", kind "Gateway" is nothing that can be published; the version is not of the form v1 or v1beta1`,
		},
		{"kind alone", "kind: Gateway\n", `a.yaml:1: kind is there, and apiVersion is missing`},
		{"apiVersion alone", "apiVersion: networking.istio.io/v1\nservices: []\n", `a.yaml:1: apiVersion is there, and kind is missing`},
		{"services in a list", "apiVersion: v1\nkind: List\nitems:\n- services: []\n", `a.yaml:4: an item of a List must have apiVersion and kind`},
		{"no metadata", "apiVersion: networking.istio.io/v1\nkind: Gateway\nspec: {}\n", `a.yaml:1: metadata is missing; it needs a name`},
		{"no resource name", "apiVersion: networking.istio.io/v1\nkind: Gateway\nmetadata:\n  namespace: a\n", `a.yaml:4: metadata has no name`},
		{
			"bad names", "apiVersion: networking.istio.io/v1\nkind: Gateway\nmetadata:\n  name: A_b\n  namespace: a.b\n",
			`a.yaml:4: metadata.name "A_b" is not legal; use lower-case letters, digits, dashes and dots; ` +
				`a.yaml:5: metadata.namespace "a.b" is not legal; use lower-case letters, digits and dashes, 63 at most`,
		},
		{"field beside spec", entry + "  hosts: [a]\nports: []\n", `a.yaml:6: unknown field "ports" of a ServiceEntry; it may have apiVersion, kind, metadata, spec, status`},
		{
			"unknown field of spec", "# one\n\n" + entry + "  hosts:\n  - a\n  # a comment\n\n  ports:\n  - number: 80\n    nam: http\n",
			`a.yaml:13: spec of ServiceEntry default/a: unknown field "nam"`,
		},
		{"value of spec", entry + "  resolution: |\n    STATIC\n  ports:\n  - number: eighty\n", `a.yaml:5: spec of ServiceEntry default/a: invalid value for enum field resolution: "STATIC\n"`},
		{"alias in spec", "services: []\n---\n" + entry + "  endpoints:\n  - &e\n    addres: a\n  - *e\n", `a.yaml:9: spec of ServiceEntry default/a: unknown field "addres"`},
		{"key of spec twice", entry + "  hosts: [a]\n  hosts: [b]\n", `a.yaml:6: "hosts" is there twice; the first is in line 5`},
		{"spec no mapping", entry + "- a\n", `a.yaml:5: spec must be a mapping, not a list`},
		{"big number", entry + "  ports: [{number: 99999999999999999999}]\n", `a.yaml:5: spec of ServiceEntry default/a: invalid value for uint32 field number: 1e+20`},
		{"infinite number", entry + "  ports: [{number: .inf}]\n", `a.yaml:5: ".inf" is not a finite number`},
		{"tag in spec", entry + "  hosts: [!x a]\n", `a.yaml:5: the tag "!x" means nothing here; leave it out`},
		{"cycle in spec", entry + "  subjectAltNames: &s [*s]\n", `a.yaml:5: values are nested deeper than 100`},
		{
			"resource twice", entry + "  hosts: [a]\n---\n" + strings.ReplaceAll(entry, "v1\n", "v1beta1\n") + "  hosts: [a]\n",
			`a.yaml:7: ServiceEntry default/a is defined in line 1 already; make one of them`,
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := parse([]byte(tt.in), "default")
			b, ok := err.(*broken) //nolint:errorlint // it is never wrapped
			if !ok {
				t.Fatalf("error is %v", err)
			}
			if diff := cmp.Diff(tt.want, b.in("a.yaml")); diff != "" {
				t.Errorf("error (-want +got):\n%s", diff)
			}
		})
	}
}

// TestAliasesAreBounded shows that a small file does not grow without bound by
// its aliases.
func TestAliasesAreBounded(t *testing.T) {
	var b strings.Builder
	b.WriteString(entry + "  a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n")
	for i := range 9 {
		fmt.Fprintf(&b, "  a%d: &a%d [%s]\n", i+1, i+1, strings.TrimSuffix(strings.Repeat(fmt.Sprintf("*a%d, ", i), 10), ", "))
	}
	_, err := parse([]byte(b.String()), "default")
	if err == nil || !strings.Contains(err.Error(), "too large once its aliases are filled in") {
		t.Errorf("error is %v", err)
	}
}

func TestHoldsNothing(t *testing.T) {
	for _, in := range []string{"", "\n", "# a comment\n", "---\n---\n", "services:\n", "null\n", "\ufeffservices: []\r\n"} {
		c, err := parse([]byte(in), "default")
		if err != nil || len(c.services)+len(c.resources) > 0 {
			t.Errorf("%q: %v, %v", in, c, err)
		}
	}
}

// TestEveryCollectionHasItsMessage shows that a document of each kind that may
// be published can be read.
func TestEveryCollectionHasItsMessage(t *testing.T) {
	for _, c := range collection.All() {
		group, kind, _ := strings.Cut(c, "/")
		_, message := collection.OfKind(group+"/v1", kind)
		if _, err := protoregistry.GlobalTypes.FindMessageByName(protoreflect.FullName(message)); err != nil {
			t.Errorf("%s: %v", c, err)
			continue
		}
		got, err := parse(fmt.Appendf(nil, "apiVersion: %s/v1\nkind: %s\nmetadata: {name: a}\n", group, kind), "ns")
		if err != nil {
			t.Errorf("%s: %v", c, err)
		} else if id := got.resources[0].id; id != (resourceID{c, "ns/a"}) || collection.OfBody(got.resources[0].res.Body.TypeUrl) != c {
			t.Errorf("%s became %v", c, id)
		}
	}
}

// FuzzParse shows that no file makes the parser panic, that the outcome is
// either content or findings, and that it is the same each time.
func FuzzParse(f *testing.F) {
	files, _ := filepath.Glob("testdata/parse/*.txtar")
	for _, file := range files {
		ar, err := txtar.ParseFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(ar.Files[0].Data)
	}
	for _, s := range []string{
		"", "a: &a [*a]\n", "services: [{name: a, meta: {<<: [{a: b}, {a: c}]}}]\n", "services:\n- name: [web\n", "? [a]\n: b\n",
		entry + "  hosts: [!!binary aGk=, 2024-01-02, 0x1f, 1e400, .nan, ~, yes]\n", "%YAML 1.1\n---\n...\n---\n", "{<<: {kind: a}, apiVersion: b}\n",
		"apiVersion: v1\nkind: List\nitems: [{apiVersion: v1, kind: List, items: []}]\n",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := parse(data, "default")
		if (c == nil) == (err == nil) {
			t.Fatalf("content %v and error %v", c, err)
		}
		again, errAgain := parse(data, "default")
		if err != nil {
			if errAgain == nil || err.Error() != errAgain.Error() {
				t.Fatalf("first %v, then %v", err, errAgain)
			}
			return
		}
		if a, b := render(t, c), render(t, again); a != b {
			t.Fatalf("first\n%s\nthen\n%s", a, b)
		}
		for _, svc := range c.services {
			if svc.Key.Name == "" {
				t.Fatal("a service without a name")
			}
			for _, i := range svc.instances {
				if i.ID == "" || i.Address == "" || len(i.Ports) == 0 {
					t.Fatalf("an instance that is not whole: %+v", i)
				}
			}
		}
	})
}

// BenchmarkParse reads a file of 1,000 services with 10 instances each.
func BenchmarkParse(b *testing.B) {
	var text strings.Builder
	text.WriteString("services:\n")
	for i := range 1000 {
		fmt.Fprintf(&text, "- name: s%d\n  ports: [{name: http, number: 80}]\n  instances:\n", i)
		for j := range 10 {
			fmt.Fprintf(&text, "  - {address: 10.%d.%d.%d, port: 8080, meta: {version: v1}}\n", i/256, i%256, j)
		}
	}
	data := []byte(text.String())
	b.SetBytes(int64(len(data)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := parse(data, "default"); err != nil {
			b.Fatal(err)
		}
	}
}
