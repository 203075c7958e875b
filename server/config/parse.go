package config

import (
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"net/netip"
	"os"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/isthmus-mesh/isthmus/internal/conf"
	"github.com/isthmus-mesh/isthmus/plugin/collection"
)

// fileType is created at first use: only the bridge reads its configuration.
var fileType = sync.OnceValue(func() *conf.Type[Config] {
	t, err := conf.New("", Default, conf.YAML)
	if err != nil {
		panic(fmt.Sprintf("BUG: config: %v", err))
	}
	return t
})

// Schema returns the JSON Schema of the file.
func Schema() []byte { return fileType().Schema }

// minPluginMemory is the lower bound of limits.plugin_memory, in bytes.
const minPluginMemory = 128 << 20

// maxRequest is what one request of a sink may have, in bytes.
const maxRequest = 64 << 20

// minBudget is the least for what sinks are sent, and for what is kept of what
// they send, in bytes.
const minBudget = 16 << 20

// minPluginFiles is the lower bound of limits.plugin_files.
const minPluginFiles = 64

// variable is the name of an environment variable.
var variable = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)

// Parse reads the configuration from the content of a file; name appears in
// messages. The error is a [Problems] or nil.
//
// After an error the configuration holds what could be read. Use it only to
// validate the blocks of registries that are [Config.Askable] with their
// plugins, so that all problems are reported together. A registry without a
// valid name then has a generated one.
func Parse(name string, data []byte, o Options) (Config, error) {
	switch {
	case o.Unexpanded:
		o.LookupEnv = nil
	case o.LookupEnv == nil:
		o.LookupEnv = os.LookupEnv
	}
	d := decoder{config: &Config{file: name, adapters: o.Adapters, text: data, doc: &conf.Document{}}, bad: make(map[string]bool)}
	c := d.config
	if len(data) > MaxSize {
		d.problem(Position{}, "", "the file is larger than %d MiB", MaxSize>>20)
	} else {
		d.decode(data, o)
	}
	if len(d.problems) == 0 {
		return *c, nil
	}
	for i := range c.Registries {
		if r := &c.Registries[i]; len(r.Name) > maxName || !label.MatchString(r.Name) {
			r.Name = fmt.Sprintf("registry-%d", i)
		}
	}
	c.problems = d.problems.Sort()
	return *c, c.problems
}

type decoder struct {
	config   *Config
	problems Problems
	bad      map[string]bool // paths with a problem, which are not validated again
}

func (d *decoder) problem(at Position, path, format string, args ...any) {
	d.bad[path] = true
	d.problems = append(d.problems, &Problem{File: d.config.file, Position: at, Field: path, Reason: fmt.Sprintf(format, args...)})
}

// decode reads and validates the content of a file.
func (d *decoder) decode(data []byte, o Options) {
	doc := fileType().ReadYAML(data, o.LookupEnv)
	for _, p := range doc.Problems {
		d.problem(p.Position, p.Field, "%s", p.Reason)
	}
	if doc.JSON == nil {
		if len(doc.Problems) == 0 {
			d.problem(Position{}, "", "the file is empty; the smallest configuration has one registry: registries: [{name: load, type: sim}]")
		}
		return
	}
	c, err := fileType().Decode(doc.JSON)
	c.file, c.adapters, c.text, c.doc = d.config.file, d.config.adapters, d.config.text, doc
	*d.config = c
	for _, f := range conf.FieldErrors(err) {
		path := f.Field
		if !doc.Has(path) {
			path = strings.Replace(path, "[0]", "", 1) // one item in place of a list
		}
		at := doc.Value(path)
		if strings.HasPrefix(f.Reason, conf.UnknownField) {
			at = doc.Position(path)
		}
		if !d.wrong(path) {
			d.problem(at, path, "%s", f.Reason)
		}
	}
	for i := range c.Registries {
		path := registryPath(i)
		c.Registries[i].Config, c.Registries[i].Translate = doc.Block(path+".config"), doc.Block(path+".translate")
	}
	switch {
	case d.bad[""]:
	case o.Unexpanded:
		d.names()
	default:
		d.validate(o)
	}
}

// wrong reports whether a field, or a block around it, has a problem.
func (d *decoder) wrong(path string) bool {
	for p := range d.bad {
		if within(path, p) {
			return true
		}
	}
	return false
}

// maxName bounds the length of a registry's name.
const maxName = 63

// label is a DNS label.
var label = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`)

// domain is a DNS name.
var domain = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`)

// check reports a problem with a field, unless the field already has one.
func (d *decoder) check(ok bool, path, format string, args ...any) {
	if !ok && !d.bad[path] {
		d.problem(d.config.Position(path), path, format, args...)
	}
}

func (d *decoder) validate(o Options) {
	c := d.config
	d.listen()

	d.check(len(c.Registries) > 0, "registries", "no registry is configured; add one, for example {name: load, type: sim}")
	names := make(map[string]int)
	for i := range c.Registries {
		d.registry(fmt.Sprintf("registries[%d]", i), &c.Registries[i], names)
	}
	d.addresses(&c.Addresses)
	d.check(domain.MatchString(c.Mesh.ClusterDomain), "mesh.cluster_domain", "must be a domain such as cluster.local")
	d.check(label.MatchString(c.Mesh.RootNamespace), "mesh.root_namespace", "must be a namespace such as istio-system")
	for i := range c.Conflicts {
		d.conflict(fmt.Sprintf("conflicts[%d]", i), &c.Conflicts[i])
	}

	levels, formats := Levels(), []string{"text", "json"}
	d.check(slices.Contains(levels, c.Log.Level), "log.level", "must be one of %s", strings.Join(levels, ", "))
	d.check(slices.Contains(formats, c.Log.Format), "log.format", "must be one of %s", strings.Join(formats, ", "))
	if c.Profile != "" && o.Profiles != nil {
		d.check(slices.Contains(o.Profiles, c.Profile), "profile", "there is no profile of this name; %s", suggest(c.Profile, o.Profiles))
	}
	d.legacy(o)
	d.consumers()
	d.telemetry(&c.Telemetry)
	d.check(c.Drain >= 0 && c.Drain <= maxDrain, "drain", "must be 0s to %s", maxDrain)
	d.check(c.Limits.ResourcesPerRegistry > 0, "limits.resources_per_registry", "must be positive")
	d.check(c.Limits.ServicesPerRegistry > 0, "limits.services_per_registry", "must be positive")
	d.check(c.Limits.BytesPerRegistry > 0, "limits.bytes_per_registry", "must be positive")
	d.check(c.Limits.PluginMemory == 0 || c.Limits.PluginMemory >= minPluginMemory, "limits.plugin_memory", "must be 0 for no bound, or at least 134217728 (128 MiB), which a plugin needs to start")
	d.check(c.Limits.PluginFiles == 0 || c.Limits.PluginFiles >= minPluginFiles, "limits.plugin_files", "must be 0 for no bound of its own, or at least %d", minPluginFiles)
	d.check(c.Limits.ConnectionsPerPeer > 0, "limits.connections_per_peer", "must be positive")
	d.check(c.Limits.Streams > 0, "limits.streams", "must be positive")
	d.check(c.Limits.RetainedBytes >= minBudget, "limits.retained_bytes", "must be at least %d (16 MiB)", minBudget)
	d.check(c.Limits.ResponseBytes >= minBudget, "limits.response_bytes", "must be at least %d (16 MiB)", minBudget)
	d.check(c.Limits.RequestBytes >= maxRequest, "limits.request_bytes", "must be at least %d (64 MiB), which one request may have", maxRequest)
	d.check(c.Limits.Tombstones > 0, "limits.tombstones", "must be positive")
}

// telemetry checks the export to a collector.
func (d *decoder) telemetry(t *Telemetry) {
	if t.Address != "" {
		host, port, err := net.SplitHostPort(t.Address)
		if err == nil {
			_, err = strconv.ParseUint(port, 10, 16)
		}
		d.check(err == nil && host != "", "telemetry.address", "must be host:port of a collector that takes OTLP over gRPC, for example 127.0.0.1:4317")
	}
	d.check(t.Traces >= 0 && t.Traces <= 1, "telemetry.traces", "must be a share from 0 to 1")
	d.check(t.Interval == 0 || t.Interval >= Duration(time.Second), "telemetry.interval", "must be 0s, or at least 1s")
	d.check((t.TLS.CertFile == "") == (t.TLS.KeyFile == ""), "telemetry.tls.key_file", "cert_file and key_file go together")
	d.check(t.TLS.Enabled || t.TLS == SinkTLS{}, "telemetry.tls.enabled", "is not true, but there are other fields of tls; set it to true, or remove them")
}

// names checks that the names of registries are unique.
func (d *decoder) names() {
	seen := make(map[string]bool)
	for i := range d.config.Registries {
		name := d.config.Registries[i].Name
		d.check(name != "" && !seen[name], registryPath(i)+".name", "must be there, and no other registry's")
		seen[name] = true
	}
}

// legacy checks the fields of the legacy protocol.
func (d *decoder) legacy(o Options) {
	c := d.config
	if c.MCP.Profile != "" && o.MCPProfiles != nil {
		d.check(slices.Contains(o.MCPProfiles, c.MCP.Profile), "mcp.profile", "there is no profile of this name; %s", suggest(c.MCP.Profile, o.MCPProfiles))
	}
	for i := range c.Sinks {
		s, path := &c.Sinks[i], fmt.Sprintf("sinks[%d]", i)
		d.check(s.Address != "", path+".address", "is missing; for example pilot.example.org:9901")
		for j := range i {
			d.check(s.Address == "" || c.Sinks[j].Address != s.Address, path+".address", "sinks[%d] has the same", j)
		}
		t := &s.TLS
		d.check((t.CertFile == "") == (t.KeyFile == ""), path+".tls.key_file", "cert_file and key_file go together")
		d.check(t.Enabled || *t == SinkTLS{}, path+".tls.enabled", "is not true, but there are other fields of tls; set it to true, or remove them")
	}
}

func (d *decoder) registry(path string, r *Registry, names map[string]int) {
	for _, block := range []*json.RawMessage{&r.Config, &r.Translate} {
		if *block == nil {
			*block = json.RawMessage("{}")
		}
	}
	d.protect(path, r)
	d.owns(path+".owns", &r.Owns)
	name := path + ".name"
	switch {
	case r.Name == "":
		d.check(false, name, "is missing; give the registry a name")
	case len(r.Name) > maxName || !label.MatchString(r.Name):
		d.check(false, name, "must be lower-case letters, digits and dashes, beginning and ending with a letter or digit, at most 63")
	case names[r.Name] != 0:
		d.check(false, name, "another registry has the name %s already, on line %d; names are unique", r.Name, names[r.Name])
	default:
		names[r.Name] = d.config.Position(name).Line
	}

	typ := path + ".type"
	switch {
	case r.Type == "":
		d.check(false, typ, "is missing; one of %s, or that of a plugin in plugin_dir", strings.Join(d.config.adapters, ", "))
	case d.config.Built(r):
		d.check(r.Plugin.PublicKey == "", path+".plugin.public_key", "the adapter %s is built in; public_key is for executables in plugin_dir", r.Type)
		d.check(r.Plugin.SHA256 == "", path+".plugin.sha256", "the adapter %s is built in; sha256 is for executables in plugin_dir", r.Type)
	case !label.MatchString(r.Type):
		cure := ""
		if name := conf.Nearest(r.Type, d.config.adapters); name != "" {
			cure = "; did you mean " + name + "?"
		}
		d.check(false, typ, "must be lower-case letters, digits and dashes%s", cure)
	case d.config.PluginDir == "":
		d.check(false, typ, "no adapter of this name is built in; %s; or set plugin_dir to the directory that has %s%s", suggest(r.Type, d.config.adapters), PluginPrefix, r.Type)
	default:
		file := d.config.Executable(r)
		info, err := os.Stat(file)
		switch {
		case errors.Is(err, os.ErrNotExist):
			d.check(false, typ, "no adapter of this name is built in (%s), and there is no %s", strings.Join(d.config.adapters, ", "), file)
		case err != nil:
			d.check(false, typ, "%s", lookError(err))
		case !info.Mode().IsRegular() || info.Mode().Perm()&0o111 == 0:
			d.check(false, typ, "%s is not an executable file; chmod +x may help", file)
		}
		sum, err := hex.DecodeString(r.Plugin.SHA256)
		d.check(r.Plugin.SHA256 == "" || err == nil && len(sum) == 32, path+".plugin.sha256", "must be 64 hexadecimal digits, as sha256sum prints them")
		key, err := base64.StdEncoding.DecodeString(r.Plugin.PublicKey)
		d.check(r.Plugin.PublicKey == "" || err == nil && len(key) == 42 && string(key[:2]) == "Ed", path+".plugin.public_key", "must be the line of 56 characters that minisign -G prints, RW...")
	}
	d.check(slices.Contains([]string{"", "required"}, r.Plugin.Confinement), path+".plugin.confinement", "must be required, or left out")
	d.check(r.Plugin.Confinement == "" || r.Plugin.Confine, path+".plugin.confinement", "is required, and confine is false; leave out one of them")
	for i, name := range r.Plugin.Env {
		d.check(variable.MatchString(name), fmt.Sprintf("%s.plugin.env[%d]", path, i), "must be the name of a variable; its value stays in the environment")
	}
}

// Bounds of durations.
const (
	minHold  = Duration(time.Second)
	maxTime  = Duration(365 * 24 * time.Hour)
	maxDrain = Duration(10 * time.Minute)
)

// protect checks the fields about the start of a registry and its removals.
func (d *decoder) protect(path string, r *Registry) {
	p := &r.Protect
	d.check(r.SyncTimeout > 0 && r.SyncTimeout <= maxTime, path+".sync_timeout", "must be more than 0, and at most %s", maxTime)
	d.check(p.Hold >= minHold && p.Hold <= maxTime, path+".protect.hold", "must be %s to %s; min_share: 0 turns the protection off", minHold, maxTime)
	d.check(p.MinServices > 0, path+".protect.min_services", "must be positive")
	d.check(p.Service.MinEndpoints > 0, path+".protect.service.min_endpoints", "must be positive")
	const share = "must be from 0 (off) to 1 (any loss is paused)"
	d.check(p.MinShare >= 0 && p.MinShare <= 1, path+".protect.min_share", share)
	d.check(p.Service.MinShare >= 0 && p.Service.MinShare <= 1, path+".protect.service.min_share", share)
}

// owns checks what a registry may say.
func (d *decoder) owns(at string, o *Owns) {
	check := func(field string, list []string, ok func(string) bool, format string, args ...any) {
		for i, text := range list {
			_, err := path.Match(text, "")
			d.check(text != "" && err == nil && ok(text), fmt.Sprintf("%s.%s[%d]", at, field, i), format, args...)
		}
	}
	all := slices.Sorted(slices.Values(collection.All()))
	check("collections", o.Collections, func(text string) bool {
		return slices.ContainsFunc(all, func(name string) bool { return MatchName(text, name) })
	}, "fits none of %s", strings.Join(all, ", "))
	check("hosts", o.Hosts, func(string) bool { return true }, "is not a pattern; *.service.consul fits every host of that domain")
	check("namespaces", o.Namespaces, func(text string) bool {
		return len(text) <= maxName && label.MatchString(strings.ReplaceAll(text, "*", "x"))
	}, "must be lower-case letters, digits and dashes, or * for any run of them")
	check("labels", o.Labels, func(string) bool { return true }, "is not a pattern; security.istio.io/tlsMode fits that label")
	for i, a := range o.Addresses {
		_, err := ParseCIDR(a)
		d.check(err == nil, fmt.Sprintf("%s.addresses[%d]", at, i), "must be a block of addresses such as 10.1.0.0/16 or fd00::/8, or one address")
	}
}

// MatchName reports whether a valid pattern of [Owns] fits the name of a
// collection, a namespace or a label.
func MatchName(pattern, name string) bool {
	ok, _ := path.Match(pattern, name)
	return ok || pattern == "*"
}

// maxWeight bounds the weight of a registry.
const maxWeight = 1000

// conflict checks a rule for hosts that exist several times.
func (d *decoder) conflict(at string, r *Conflict) {
	hosts := at + ".hosts"
	d.check(len(r.Hosts) > 0, hosts, `is missing; name hosts or patterns such as "*.example.org", or "*" for every host`)
	for i, h := range r.Hosts {
		item := fmt.Sprintf("%s[%d]", hosts, i)
		_, err := path.Match(h, "")
		d.check(h != "", item, `is empty; write "*" for every host`)
		d.check(err == nil, item, `%s is not a pattern: a [ needs its ], and a \ something behind it; *.example.org fits every host of that domain`, h)
		d.check(!strings.ContainsAny(h, "/ "), item, "%s fits no host, as none has a slash or a space", h)
	}
	policies := []string{"priority", "isolate", "merge"}
	d.check(slices.Contains(policies, r.Policy), at+".policy", "must be one of %s", strings.Join(policies, ", "))
	var names []string
	for i := range d.config.Registries {
		names = append(names, d.config.Registries[i].Name)
	}
	d.check(r.Registry == "" || slices.Contains(names, r.Registry), at+".registry", "no registry has this name; %s", suggest(r.Registry, names))
	weights := at + ".weights"
	if r.Weights == nil {
		return
	}
	d.check(r.Registry == "", weights, "are shares of registries, and with registry the rule is for the services of one")
	d.check(r.Policy == "merge" || !slices.Contains(policies, r.Policy), weights, "is for policy merge; with %s each host has one registry's endpoints, or each namespace its own", r.Policy)
	sum := 0
	for _, name := range slices.Sorted(maps.Keys(r.Weights)) {
		n, item := r.Weights[name], weights+"."+name
		sum += max(n, 0)
		d.check(slices.Contains(names, name), item, "no registry has this name; %s", suggest(name, names))
		d.check(n >= 0 && n <= maxWeight, item, "must be 0 to %d", maxWeight)
	}
	d.check(sum > 0, weights, "has no share above 0, so that nothing would be served; give the registry that is to serve the host at least 1")
}

// minHostBits bounds the size of the network of the hosts' addresses.
const minHostBits = 8

// unusable are networks that hosts cannot have addresses of, with what they are
// for.
var unusable = []struct{ network, of string }{
	{"0.0.0.0/8", "this host"},
	{"127.0.0.0/8", "loopback"},
	{"169.254.0.0/16", "link-local addresses"},
	{"224.0.0.0/4", "multicast"},
	{"240.240.0.0/16", "addresses that istiod allocates"},
	{"255.255.255.0/24", "broadcast"},
	{"::/96", "loopback"},
	{"::ffff:0:0/96", "IPv4 addresses"},
	{"2001:2::/48", "addresses that istiod allocates"},
	{"fe80::/10", "link-local addresses"},
	{"ff00::/8", "multicast"},
}

// addresses checks the network of the hosts' addresses.
func (d *decoder) addresses(a *Addresses) {
	const at = "addresses.cidr"
	if a.CIDR == "" {
		return
	}
	p, err := netip.ParsePrefix(a.CIDR)
	if err != nil {
		d.check(false, at, "is not a network; write it like 10.64.0.0/10")
		return
	}
	d.check(p == p.Masked(), at, "is an address in a network; write %s for the network", p.Masked())
	d.check(p.Addr().BitLen()-p.Bits() >= minHostBits, at, "has fewer than %d addresses; choose a wider network", 1<<minHostBits)
	for _, u := range unusable {
		if n := netip.MustParsePrefix(u.network); n.Overlaps(p) {
			d.check(false, at, "overlaps with %s, which is for %s; choose another network", n, u.of)
			return
		}
	}
}

// lookError explains why an executable cannot be examined, with the cure.
func lookError(err error) string {
	switch {
	case errors.Is(err, fs.ErrPermission):
		return err.Error() + "; make plugin_dir and the folders around it readable for the user that runs isthmus (chmod a+rx)"
	case errors.Is(err, syscall.ENOTDIR):
		return err.Error() + "; plugin_dir must be the directory that has the executable"
	default:
		return err.Error() + "; correct plugin_dir, or move the executable to another"
	}
}

// suggest returns "did you mean X?" if a name resembles got, else the list of
// all names.
func suggest(got string, names []string) string {
	if best := conf.Nearest(got, names); best != "" {
		return "did you mean " + best + "?"
	}
	return "there are " + strings.Join(names, ", ")
}
