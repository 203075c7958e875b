package config

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

func parse(t *testing.T, text string, o Options) Config {
	t.Helper()
	c, err := Parse("f", []byte(text), o)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

const running = `
listen: {xds: [127.0.0.1:1, 127.0.0.1:2], admin: 127.0.0.1:3}
registries:
- {name: a, type: consul, config: {address: "http://x", token: hush, tags: [t]}, translate: {namespace: n}}
- {name: b, type: sim, config: {services: 3}}
- {name: c, type: sim, config: {services: 4}}
sinks: [{address: "pilot:1", metadata: {authorization: hush}}]
`

// What changes is told by names; values, which may be secrets, are not.
func TestDiff(t *testing.T) {
	for _, tt := range []struct {
		name string
		edit []string // pairs of what is replaced by what
		want Difference
	}{
		{name: "nothing"},
		{name: "the order of keys", edit: []string{"{services: 3}", "{\"services\": 3}", "address: \"http://x\", token: hush", "token: hush, address: \"http://x\""}},
		{
			name: "blocks", edit: []string{"token: hush", "token: other", "tags: [t]", "tags: [t, u], filter: f", "namespace: n", "namespace: m"},
			want: Difference{Changed: []RegistryDifference{{Name: "a", Fields: []string{"config.filter", "config.tags", "config.token", "translate.namespace"}}}},
		},
		{name: "removed", edit: []string{"- {name: b, type: sim, config: {services: 3}}\n", ""}, want: Difference{Removed: []string{"b"}}},
		{name: "added", edit: []string{"sinks:", "- {name: d, type: sim}\nsinks:"}, want: Difference{Added: []string{"d"}}},
		{name: "renamed", edit: []string{"name: b", "name: z"}, want: Difference{Changed: []RegistryDifference{{Name: "z", Was: "b", Fields: nil}}}},
		{
			name: "renamed and changed is another one", edit: []string{"name: b", "name: z", "services: 3", "services: 5"},
			want: Difference{Added: []string{"z"}, Removed: []string{"b"}},
		},
		{
			name: "names exchanged", edit: []string{"name: b", "name: X", "name: c", "name: b", "name: X", "name: c"},
			want: Difference{Changed: []RegistryDifference{{Name: "c", Fields: []string{"config.services"}}, {Name: "b", Fields: []string{"config.services"}}}, Reordered: true},
		},
		{
			name: "conflicts", edit: []string{"sinks:", "conflicts: [{hosts: [x], policy: merge, weights: {b: 1}}]\nsinks:"},
			want: Difference{Fields: []string{"conflicts"}},
		},
		{name: "addresses", edit: []string{"sinks:", "addresses: {cidr: 10.64.0.0/10}\nsinks:"}, want: Difference{Fields: []string{"addresses.cidr"}}},
		{name: "order", edit: []string{"{name: b, type: sim, config: {services: 3}}", "X", "{name: c, type: sim, config: {services: 4}}", "{name: b, type: sim, config: {services: 3}}", "X", "{name: c, type: sim, config: {services: 4}}"}, want: Difference{Reordered: true}},
		{
			name: "listeners", edit: []string{"127.0.0.1:2,", "127.0.0.1:4,", "127.0.0.1:2]", "127.0.0.1:4]", "admin: 127.0.0.1:3", "admin: {address: 127.0.0.1:3}, mcp: 127.0.0.1:5"},
			want: Difference{ListenersAdded: []string{"listen.xds 127.0.0.1:4", "listen.mcp 127.0.0.1:5"}, ListenersRemoved: []string{"listen.xds 127.0.0.1:2"}},
		},
		{
			name: "rules of a listener", edit: []string{"admin: 127.0.0.1:3", "admin: {address: 127.0.0.1:3, allow: [{peer: {token_file: t}}]}"},
			want: Difference{ListenersChanged: []string{"listen.admin 127.0.0.1:3"}},
		},
		{
			name: "others", edit: []string{"sinks:", "drain: 0s\nlog: {level: debug, format: json}\nlimits: {tombstones: 3}\nsinks:", "authorization: hush", "authorization: other"},
			want: Difference{
				Fields:      []string{"log.level", "log.format", "limits.tombstones", "sinks[0].metadata", "drain"},
				NeedRestart: []string{"log.format", "limits.tombstones"},
			},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			text := running
			for i := 0; i < len(tt.edit); i += 2 {
				text = strings.ReplaceAll(text, tt.edit[i], tt.edit[i+1])
			}
			before := parse(t, running, Options{Adapters: builtIn})
			after := parse(t, text, Options{Adapters: builtIn})
			got := before.Diff(&after)
			if tt.name == "renamed" {
				tt.want.Changed[0].Fields = []string{"name"}
			}
			if d := cmp.Diff(tt.want, got, cmpopts.EquateEmpty()); d != "" {
				t.Errorf("(-want +got):\n%s", d)
			}
			if b, err := json.Marshal(got); err != nil || strings.Contains(string(b), "hush") || strings.Contains(string(b), "other") || strings.Contains(string(b), "null") {
				t.Errorf("as JSON: %s, %v", b, err)
			}
			if got.Empty() != (len(tt.edit) == 0 || strings.HasPrefix(tt.name, "the order of keys")) {
				t.Errorf("Empty = %v", got.Empty())
			}
		})
	}
}

// Two files are compared without the values of variables, which the answer
// could tell otherwise: as a name.
func TestUnexpanded(t *testing.T) {
	secret := Options{Adapters: builtIn, LookupEnv: func(string) (string, bool) { return "hush", true }}
	c := parse(t, "registries: [{name: '${T}', type: sim, config: {services: 3}, translate: {namespace: '${T}'}}]", secret)
	bare, err := c.Unexpanded()
	if err != nil {
		t.Fatal(err)
	}
	next := parse(t, "profile: '${T}'\nregistries: [{name: x, type: '${T}'}]", Options{Unexpanded: true})
	got, err := json.Marshal(bare.Diff(&next))
	if err != nil || strings.Contains(string(got), "hush") || !strings.Contains(string(got), `"registries_removed":["${T}"]`) {
		t.Errorf("Diff = %s, %v", got, err)
	}
	waits := func(timeout, hold string) Config {
		return parse(t, fmt.Sprintf("registries: [{name: a, sync_timeout: '%s', protect: {hold: '%s'}}]", timeout, hold), Options{Unexpanded: true})
	}
	first := waits("${T}", "${N}m")
	for _, tt := range []struct{ timeout, hold, want string }{
		{"${T}", "${N}m", "[]"},
		{"${U}", "${N}m", "[{a  [sync_timeout]}]"},
		{"1m", "${N}h", "[{a  [sync_timeout protect.hold]}]"},
	} {
		next := waits(tt.timeout, tt.hold)
		if got := fmt.Sprint(first.Diff(&next).Changed); got != tt.want {
			t.Errorf("with %s and %s changed: %s, want %s", tt.timeout, tt.hold, got, tt.want)
		}
	}
	if _, err := Parse("f", []byte("registries: [{name: a}, {name: a}, {}]"), Options{Unexpanded: true}); err == nil || strings.Count(err.Error(), "\n") != 1 {
		t.Errorf("names that are not unique: %v", err)
	}
	sum := sha256.Sum256(c.text)
	if c.Hash() != hex.EncodeToString(sum[:]) {
		t.Error("Hash is not that of the file")
	}
}

func TestDrain(t *testing.T) {
	for text, ok := range map[string]bool{"0s": true, "10m": true, "-1s": false, "11m": false, "5": false, "x": false} {
		_, err := Parse("f", []byte("drain: "+text+"\nregistries: [{name: a, type: sim}]"), Options{Adapters: builtIn})
		if (err == nil) != ok {
			t.Errorf("drain: %s gives %v", text, err)
		}
	}
}
