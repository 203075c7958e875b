package dubbo

import (
	"fmt"
	"strings"
	"testing"

	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// TestParseProvider shows the parts of the URLs that Dubbo 2.7 and 3 write.
func TestParseProvider(t *testing.T) {
	for text, want := range map[string]string{
		"dubbo://192.0.2.2:20882/org.example.Greeter?anyhost=true&application=shop&interface=org.example.Greeter&pid=28117":       "{{org.example.Greeter  } dubbo 192.0.2.2 20882 map[anyhost:true application:shop interface:org.example.Greeter pid:28117]}",
		"tri://192.0.2.2:50061/alias?group=g1&interface=org.example.Outer$Greeter&prefer.serialization=hessian2,json&version=1.0": "{{org.example.Outer$Greeter g1 1.0} tri 192.0.2.2 50061 map[group:g1 interface:org.example.Outer$Greeter prefer.serialization:hessian2,json version:1.0]}",
		"rest://u:p@[2001:db8::1]:80/org.example.Greeter":                                                                         "{{org.example.Greeter  } rest 2001:db8::1 80 map[]}",
		"dubbo://a:1":         "it names no interface",
		"dubbo://a/i":         "it has no port",
		"dubbo://:1/i":        "it has no address",
		"dubbo://a:70000/i":   `"70000" is not a port`,
		"10.0.0.1:20880":      "it is not a URL",
		"dubbo://a:1/i?&=x&y": "{{i  } dubbo a 1 map[y:]}",
	} {
		p, err := ParseProvider(text)
		got := fmt.Sprint(p)
		if err != nil {
			got = err.Error()
		}
		if got != want {
			t.Errorf("%s:\n%s\nwant\n%s", text, got, want)
		}
	}
}

// TestParseName shows the names that Dubbo has in Nacos.
func TestParseName(t *testing.T) {
	for name, want := range map[string]string{
		"providers:org.example.Greeter:1.0.0:g": "{org.example.Greeter g 1.0.0} true true",
		"providers:org.example.Greeter::":       "{org.example.Greeter  } true true",
		"providers:org.example.Greeter":         "{org.example.Greeter  } true true",
		"consumers:org.example.Greeter:1.0.0:":  "{org.example.Greeter  1.0.0} false true",
		"shop":                                  "{  } false false",
		"providers::1.0.0:":                     "{  } false false",
		"a:b":                                   "{  } false false",
	} {
		n, offered, ok := ParseName(name)
		if got := fmt.Sprint(n, offered, ok); got != want {
			t.Errorf("%s: %s, want %s", name, got, want)
		}
	}
}

// list parses providers.
func list(t *testing.T, urls ...string) (all []Provider) {
	t.Helper()
	for _, u := range urls {
		p, err := ParseProvider(u)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, p)
	}
	return all
}

// show returns instances as short texts.
func show(instances []registry.Instance) string {
	var out []string
	for _, i := range instances {
		text := i.ID
		for _, p := range i.Ports {
			text += fmt.Sprintf(" %s:%d", p.Name, p.Number)
		}
		if i.Weight != nil {
			text += fmt.Sprint(" weight ", *i.Weight)
		}
		if i.Disabled {
			text += " off"
		}
		out = append(out, text)
	}
	return strings.Join(out, "; ")
}

// TestInstances shows that the protocols of one provider are ports of one
// instance, and what is an instance of its own.
func TestInstances(t *testing.T) {
	for _, c := range []struct {
		urls []string
		want string
	}{
		{[]string{"tri://a:50051/i?application=s", "dubbo://a:20880/i?application=s"}, "a:20880 dubbo:20880 tri:50051"},
		{[]string{"dubbo://a:20881/i?application=s", "tri://a:2/i?application=s", "dubbo://a:20880/i?application=s", "tri://a:1/i?application=s"}, "a:20880 dubbo:20880 tri:1; a:20881 dubbo:20881 tri:2"},
		{[]string{"dubbo://a:1/i?application=s", "dubbo://a:1/i?application=t"}, "a:1 dubbo:1; a:1/t dubbo:1"},
		{[]string{"dubbo://a:1/i", "dubbo://a:1/i?timestamp=2"}, "a:1 dubbo:1"},
		{[]string{"dubbo://a:1/i?weight=200", "dubbo://b:1/i?weight=100", "dubbo://c:1/i?weight=0&disabled=true"}, "a:1 dubbo:1 weight 2; b:1 dubbo:1; c:1 dubbo:1 weight 0 off"},
	} {
		got, problem := Instances(list(t, c.urls...))
		if show(got) != c.want || problem != "" {
			t.Errorf("%q:\n%s, %s\nwant\n%s", c.urls, show(got), problem, c.want)
		}
	}
	if _, problem := Instances(list(t, "dubbo://a:1/i?weight=x")); !strings.Contains(problem, `"x"`) {
		t.Errorf("problem %q", problem)
	}
}

// TestApply shows which providers a rule is for, and which of two wins.
func TestApply(t *testing.T) {
	providers := list(t, "dubbo://10.0.0.1:20880/i?application=s&group=g&zone=a", "dubbo://10.0.0.2:20880/i?application=s&group=g&weight=50")
	for _, c := range []struct {
		rules []string
		want  string
	}{
		{nil, "10.0.0.1:20880 dubbo:20880; 10.0.0.2:20880 dubbo:20880 weight 0.5"},
		{[]string{"override://0.0.0.0/i?weight=200"}, "10.0.0.1:20880 dubbo:20880 weight 2; 10.0.0.2:20880 dubbo:20880 weight 2"},
		{[]string{"override://10.0.0.2/i?weight=10", "override://0.0.0.0/i?weight=200&priority=9"}, "10.0.0.1:20880 dubbo:20880 weight 2; 10.0.0.2:20880 dubbo:20880 weight 0.1"},
		{[]string{"override://0.0.0.0/i?weight=10&priority=2", "override://0.0.0.0/i?weight=200&priority=1"}, "10.0.0.1:20880 dubbo:20880 weight 0.1; 10.0.0.2:20880 dubbo:20880 weight 0.1"},
		{[]string{"absent://0.0.0.0/i?weight=200"}, "10.0.0.1:20880 dubbo:20880 weight 2; 10.0.0.2:20880 dubbo:20880 weight 0.5"},
		{[]string{"override://10.0.0.1:20880/i?disabled=true"}, "10.0.0.1:20880 dubbo:20880 off; 10.0.0.2:20880 dubbo:20880 weight 0.5"},
		{[]string{"override://0.0.0.0/i?disabled=true&~zone=a&group=*&application=s"}, "10.0.0.1:20880 dubbo:20880 off; 10.0.0.2:20880 dubbo:20880 weight 0.5"},
		{[]string{
			"override://0.0.0.0/i?disabled=true&enabled=false", "override://0.0.0.0/i?disabled=true&side=consumer", "override://0.0.0.0/i?disabled=true&group=h",
			"override://0.0.0.0/i?disabled=true&application=t", "override://10.0.0.1:1/i?disabled=true", "override://10.0.0.3/i?disabled=true", "override://0.0.0.0/i?disabled=true&version=1",
		}, "10.0.0.1:20880 dubbo:20880; 10.0.0.2:20880 dubbo:20880 weight 0.5"},
	} {
		var rules []Override
		for _, text := range c.rules {
			r, err := ParseOverride(text)
			if err != nil {
				t.Fatal(err)
			}
			rules = append(rules, r)
		}
		got, _ := Instances(Apply(rules, providers))
		if show(got) != c.want {
			t.Errorf("%q:\n%s\nwant\n%s", c.rules, show(got), c.want)
		}
	}
	if providers[0].Params["disabled"] != "" {
		t.Error("a rule changed the provider itself")
	}
	for _, wrong := range []string{"route://0.0.0.0/i", "x"} {
		if _, err := ParseOverride(wrong); err == nil {
			t.Errorf("%s is taken for a rule", wrong)
		}
	}
}

// TestOffers shows what an instance of an application offers of an interface.
func TestOffers(t *testing.T) {
	offer, err := ParseMetadata([]byte(`{"app":"s","services":{"g/i:1:tri":{"name":"i","group":"g","version":"1","protocol":"tri","port":7,"params":{"methods":"a"}},"i:rest":{"name":"i","protocol":"rest","port":0}}}`))
	if err != nil {
		t.Fatal(err)
	}
	ports, err := Endpoints(map[string]string{endpointsKey: `[{"port":50051,"protocol":"tri"},{"port":20880,"protocol":"dubbo"}]`})
	if err != nil {
		t.Fatal(err)
	}
	in := registry.Instance{Address: "a", Ports: ports}
	for want, got := range map[string]any{
		"[{{i g 1} tri a 50051 map[methods:a]}]": Offers("i", offer, in),
		"[]":                                     Offers("j", offer, in),
		"[{{j  } dubbo a 20880 map[]} {{j  } tri a 50051 map[]}]": Offers("j", nil, in),
		"[a b]": ParseMapping([]byte("b, a,,b")),
	} {
		if fmt.Sprint(got) != want {
			t.Errorf("%v, want %s", got, want)
		}
	}
	for _, wrong := range []string{"", "{}", `{"services":{"x":{}}}`} {
		if _, err := ParseMetadata([]byte(wrong)); err == nil {
			t.Errorf("%s is taken for metadata", wrong)
		}
	}
	for _, wrong := range []string{"x", `[{"port":0,"protocol":"tri"}]`, `[{"port":1}]`} {
		if _, err := Endpoints(map[string]string{endpointsKey: wrong}); err == nil {
			t.Errorf("%s is taken for endpoints", wrong)
		}
	}
}

// FuzzURL shows that no text makes a parser panic, and that what it returns can
// be used: each instance has an ID of its own.
func FuzzURL(f *testing.F) {
	f.Add("dubbo://10.0.0.1:20880/i?weight=3&group=g", "override://0.0.0.0/i?~group=g&weight=x", "providers:i:1:g", `{"services":{"a":{"name":"a","protocol":"tri"}}}`)
	f.Fuzz(func(t *testing.T, provider, rule, name, data string) {
		var all []Provider
		if p, err := ParseProvider(provider); err == nil {
			again := p
			again.Params = map[string]string{"application": name}
			all = append(all, p, again)
		}
		var rules []Override
		if r, err := ParseOverride(rule); err == nil {
			rules = append(rules, r)
		}
		instances, _ := Instances(Apply(rules, all))
		ids := map[string]bool{}
		for _, i := range instances {
			if i.ID == "" || ids[i.ID] || len(i.Ports) == 0 {
				t.Errorf("%+v", instances)
			}
			ids[i.ID] = true
		}
		n, _, _ := ParseName(name)
		_ = n.Service("x", all)
		if offer, err := ParseMetadata([]byte(data)); err == nil {
			for i := range offer {
				_ = Offers(i, offer, registry.Instance{Ports: []registry.Port{{Protocol: "tri", Number: 1}}})
			}
		}
		_, _ = Endpoints(map[string]string{endpointsKey: data})
		_ = ParseMapping([]byte(data))
	})
}
