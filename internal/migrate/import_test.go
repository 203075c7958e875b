package migrate

import (
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

// Whatever a file holds, what comes out is YAML, and nothing of the file
// becomes a line of it.
func FuzzImport(f *testing.F) {
	f.Add("kind: McpBridge\nspec: {registries: [{name: a, type: nacos2, domain: x, port: 1, nacosGroups: [a], vport: {default: 80}}, {type: consul, consulDatacenter: d}, {type: dns}]}")
	f.Add("a: [{NacosSource: {Enabled: true, Address: [x], Group: g, NsHost: false, Password: p, Username: u, SvcPort: 81}}]")
	f.Add("nacos.istio.mcp.server.enabled=true\nserver.port = 1\nnacos.istio.domain.suffix=x")
	f.Add("--consulAddress x:1 -fqdn=a")
	f.Add("kind: McpBridge\nspec: {registries: &a [*a, {name: x, type: &b [*b]}], x: *a}")
	f.Add("a: [{NacosSource: &a {Address: &b [*b], x: *a, y: *b}}]")
	f.Fuzz(func(t *testing.T, text string) {
		out, err := Import([]byte(text), []string{"consul", "nacos"})
		if err != nil {
			if out != "" || err.Error() == "" {
				t.Errorf("%q: with the error %v comes %q", text, err, out)
			}
			return
		}
		var config struct {
			Listen     map[string]string
			Registries []struct {
				Name, Type        string
				Config, Translate map[string]any
			}
		}
		dec := yaml.NewDecoder(strings.NewReader(out))
		dec.KnownFields(true)
		if err := dec.Decode(&config); err != nil {
			t.Fatalf("%q: %v\n%s", text, err, out)
		}
		seen := map[string]bool{}
		for _, r := range config.Registries {
			if r.Name == "" || seen[r.Name] || r.Type != "consul" && r.Type != "nacos" || r.Translate["preset"] == nil {
				t.Errorf("%q: registry %+v", text, r)
			}
			seen[r.Name] = true
		}
	})
}
