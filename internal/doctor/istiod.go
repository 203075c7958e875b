package doctor

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"
)

// Getter reads a path of a server.
type Getter func(ctx context.Context, path string) ([]byte, error)

// Istiod is what an istiod says about itself on its debug pages.
type Istiod struct {
	// Mesh is its mesh configuration.
	Mesh *Mesh
	// Version is its version, as far as a page or a connected proxy tells it.
	Version Version

	name    string
	ambient bool
	configs []istiodConfig
}

type istiodConfig struct {
	Kind     string `json:"kind"`
	Metadata struct {
		Name            string `json:"name"`
		Namespace       string `json:"namespace"`
		ResourceVersion string `json:"resourceVersion"`
	} `json:"metadata"`
	Spec json.RawMessage `json:"spec"`
}

// Has reports whether istiod has a resource, by its kind and "namespace/name".
func (i *Istiod) Has(kind, name string) bool {
	return slices.ContainsFunc(i.configs, func(c istiodConfig) bool {
		return c.Kind == kind && c.Metadata.Namespace+"/"+c.Metadata.Name == name
	})
}

// ReadIstiod reads the debug pages of an istiod. Name appears in findings.
func ReadIstiod(ctx context.Context, name string, get Getter) (*Istiod, error) {
	i := &Istiod{name: name}
	text, err := get(ctx, "/debug/mesh")
	if err != nil {
		return nil, err
	}
	if i.Mesh, err = ReadMesh("/debug/mesh of "+name, text); err != nil {
		return nil, err
	}
	if err := read(ctx, get, "/debug/configz", &i.configs); err != nil {
		return nil, err
	}
	var proxies []struct {
		Type    string `json:"proxy_type"`
		Version string `json:"istio_version"`
	}
	if err := read(ctx, get, "/debug/syncz", &proxies); err != nil {
		return nil, err
	}
	if text, err := get(ctx, "/version"); err == nil { // only where it serves its metrics on the same port
		i.Version = ParseVersion(string(bytes.TrimSpace(text)))
	}
	for _, p := range proxies {
		if v := ParseVersion(p.Version); v.Minor > i.Version.Minor {
			i.Version = v // a proxy is never newer than its istiod
		}
		if p.Type == "ztunnel" || p.Type == "waypoint" {
			i.ambient = true
		}
	}
	if !i.ambient {
		i.ambient = ambientIndex(ctx, get)
	}
	return i, nil
}

// ambientIndex reports whether istiod keeps an index for ambient: its debug
// page of collections names them then. Versions before 1.26 have no such page.
func ambientIndex(ctx context.Context, get Getter) bool {
	text, err := get(ctx, "/debug/krtz")
	if err != nil {
		return false
	}
	var collections []struct {
		Name string `json:"name"`
	}
	return json.Unmarshal(text, &collections) == nil &&
		slices.ContainsFunc(collections, func(c struct {
			Name string `json:"name"`
		},
		) bool {
			return strings.HasPrefix(c.Name, "ambient/")
		})
}

func read(ctx context.Context, get Getter, path string, into any) error {
	text, err := get(ctx, path)
	if err == nil {
		err = json.Unmarshal(text, into)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

// Check returns what is wrong with an istiod that is to follow the bridge.
func (i *Istiod) Check(b Bridge) []Finding {
	stubs, wrong := i.checkStubs()
	b.Stubs = b.Stubs || stubs > 0
	found := append(i.Mesh.Check(b, i.Version), wrong...)
	ambient := slices.ContainsFunc(found, func(f Finding) bool { return f.Check == "ambient" })
	if i.ambient && !ambient && !b.Stubs {
		found = append(found, Finding{Check: "ambient", Severity: Warning, Subject: "istiod " + i.name, Problem: ambientProblem, Change: ambientChange})
	}
	return append(found, i.checkAddresses()...)
}

// stubSuffix is what the names of stubs end in.
const stubSuffix = ".isthmus-stub"

// checkStubs compares the stubs that istiod has of Kubernetes with the services
// that it has by xDS, and returns the number of stubs.
func (i *Istiod) checkStubs() (stubs int, found []Finding) {
	type entry struct {
		Hosts     []string
		Addresses []string
		Location  string
		Ports     []struct {
			Number   uint32
			Protocol string
		}
	}
	served := make(map[string][]string) // by namespace and host
	var wrong []string
	for _, pass := range []bool{false, true} {
		for _, c := range i.configs {
			stub := strings.HasSuffix(c.Metadata.Name, stubSuffix)
			var e entry
			if c.Kind != "ServiceEntry" || stub != pass || json.Unmarshal(c.Spec, &e) != nil || len(e.Hosts) != 1 {
				continue
			}
			key, text := c.Metadata.Namespace+"/"+e.Hosts[0], fmt.Sprintf("addresses %v, ports %v, location %s", e.Addresses, e.Ports, cmp.Or(e.Location, "MESH_EXTERNAL"))
			if !stub {
				served[key] = append(served[key], text)
				continue
			}
			stubs++
			switch have := served[key]; {
			case len(have) == 0:
				wrong = append(wrong, fmt.Sprintf("%s/%s stands for the host %s, which it does not have by xDS", c.Metadata.Namespace, c.Metadata.Name, e.Hosts[0]))
			case !slices.Contains(have, text):
				wrong = append(wrong, fmt.Sprintf("%s/%s has %s, and by xDS %s has %s", c.Metadata.Namespace, c.Metadata.Name, text, e.Hosts[0], have[0]))
			}
		}
	}
	if len(wrong) > 0 {
		slices.Sort(wrong)
		found = append(found, Finding{
			Check: "istiod-stubs", Severity: Failure, Subject: "istiod " + i.name,
			Problem: fmt.Sprintf("%d of %s do not fit what it has of the bridge, so that calls through ztunnel fail or time out; the first: %s", len(wrong), Count(stubs, "stub", "stubs"), wrong[0]),
			Change:  "consumers.kubernetes, with which the bridge keeps stubs as they should be, or apply again what isthmus dump --for kubernetes prints, and delete the others",
		})
	}
	return stubs, found
}

// firstWithoutAddresses is the first version of Istio that allocates no address
// to a host of a config source.
const firstWithoutAddresses = 25

// checkAddresses finds hosts without an address that speak raw TCP on one port.
func (i *Istiod) checkAddresses() []Finding {
	if i.Version.Minor > 0 && i.Version.Minor < firstWithoutAddresses {
		return nil
	}
	hosts := make(map[uint32][]string) // by port
	for _, c := range i.configs {
		var spec struct {
			Hosts      []string
			Addresses  []string
			Resolution string
			Ports      []struct {
				Number   uint32
				Protocol string
			}
		}
		if c.Kind != "ServiceEntry" || json.Unmarshal(c.Spec, &spec) != nil || len(spec.Addresses) > 0 || len(spec.Hosts) != 1 || strings.HasPrefix(spec.Hosts[0], "*") {
			continue
		}
		for _, p := range spec.Ports {
			if strings.EqualFold(p.Protocol, "tcp") {
				hosts[p.Number] = append(hosts[p.Number], spec.Hosts[0])
			}
		}
	}
	var found []Finding
	for _, port := range slices.Sorted(maps.Keys(hosts)) {
		list := hosts[port]
		slices.Sort(list)
		if list = slices.Compact(list); len(list) < 2 {
			continue
		}
		found = append(found, Finding{
			Check: "istiod-addresses", Severity: Failure, Subject: "istiod " + i.name,
			Problem: fmt.Sprintf("%d hosts without an address speak raw TCP on port %d: proxies cannot tell them apart, and send all calls to one of them: %s", len(list), port, some(list)),
			Change:  "let the bridge add addresses: remove profile from its configuration, and resolution NONE from these services",
		})
	}
	return found
}

// maxNamed is the number of names in a finding.
const maxNamed = 5

func some(names []string) string {
	if len(names) <= maxNamed {
		return strings.Join(names, ", ")
	}
	return strings.Join(names[:maxNamed], ", ") + " and " + Count(len(names)-maxNamed, "other", "others")
}

// PortOf returns the port of an address, "" if it has none.
func PortOf(address string) string {
	_, port, err := net.SplitHostPort(address)
	if _, number := strconv.ParseUint(port, 10, 16); err != nil || number != nil {
		return ""
	}
	return port
}
