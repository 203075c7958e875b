package xds

import (
	"strings"

	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/stream"
	"github.com/isthmus-mesh/isthmus/server/view"
)

// profiles is the table, oldest first. The workarounds are harmless elsewhere,
// but each costs bytes. testdata/form_NAME.txtar shows the effect of each row.
var profiles = stream.Profiles{
	{
		Name: "istio-1.9", Versions: "Istio 1.9 and older",
		Form:  encode.Form{Shape: encode.Inline, PortSets: true, EmptySelector: true},
		Limit: view.MaxMessage,
		Why:   "Does not ask for Telemetry. Every change is a full push there.",
	},
	{
		Name: "istio-1.10", Versions: "Istio 1.10 and 1.11",
		Form:  encode.Form{Shape: encode.Inline, PortSets: true, OmitVersion: true, EmptySelector: true},
		Limit: view.MaxMessage,
		Why:   "Does not ask for WasmPlugin. A version in a resource makes every update conflict on 1.11.",
	},
	{
		Name: "istio-1.12", Versions: "Istio 1.12",
		Form: encode.Form{Shape: encode.Inline, PortSets: true, EmptySelector: true},
		Why:  "Does not ask for ProxyConfig. A resource whose version is known is not looked at, from here on; responses may have any size.",
	},
	{
		Name: "istio-1.13", Versions: "Istio 1.13 to 1.23",
		Form: encode.Form{Shape: encode.Inline, Address: true, PortSets: true, EmptySelector: true, EndpointsHash: true},
		Why: "Asks for ProxyConfig, and for ServiceEntry as v1alpha3. An entry without an address makes each change of its endpoints a full push from 1.14 on. " +
			"With one, 1.14 to 1.22.3 see which addresses come and go and nothing else, so the entry has a label that changes with what they would miss.",
	},
	{
		Name: istio123, Versions: "Istio 1.23, and 1.21 and 1.22 from 1.21.6 and 1.22.4 on, if the configuration names it",
		Form: encode.Form{Shape: encode.Inline, Address: true, PortSets: true, EmptySelector: true},
		Why:  "Asks for what 1.13 asks for and sees every change of an endpoint, so the label of istio-1.13 would only cost full pushes.",
	},
	{
		Name: "istio-1.24", Versions: "Istio 1.24 to 1.29",
		Form: encode.Form{Shape: encode.Inline, Address: true, PortSets: true, EmptySelector: true},
		Why:  "Asks for ServiceEntry as v1. An entry without an address makes each change of its endpoints a full push on 1.24; a change of one of several ports of one IP, or to no endpoints at all, is not seen. From 1.25 on istiod allocates no address to a host that has none.",
	},
	{
		Name: "istio-1.30", Versions: "Istio 1.30 and later",
		Form: encode.Form{Shape: encode.Inline, Address: true},
		Why: "Asks for TrafficExtension. A change of endpoints is an incremental push in any form. istiod allocates no addresses: without ours " +
			"all raw TCP hosts of one port would share one listener, and DNS capture would know no host.",
	},
	{
		Name: "tools", Versions: "whatever does not ask for MeshConfig",
		Form: encode.Form{Shape: encode.Inline},
		Why:  "Tools and relays: no workarounds, answered without waiting for the set of types.",
	},
}

// istio123 is the only profile that no set of types identifies.
const istio123 = "istio-1.23"

// Profiles returns the names of all profiles, oldest sinks first.
func Profiles() []string { return profiles.Names() }

// FormOf returns the form in which sinks of a profile receive resources.
func FormOf(profile string) (encode.Form, error) {
	p, err := profiles.Find(profile)
	if err != nil {
		return encode.Form{}, err
	}
	return p.Form, nil
}

var (
	istio19  = profiles.Must("istio-1.9")
	istio110 = profiles.Must("istio-1.10")
	istio112 = profiles.Must("istio-1.12")
	istio113 = profiles.Must("istio-1.13")
	istio124 = profiles.Must("istio-1.24")
	istio130 = profiles.Must("istio-1.30")
	tools    = profiles.Must("tools")
)

// meshConfig is a type that every istiod requests and other clients do not.
const meshConfig = "core/MeshConfig"

// fingerprint identifies a sink by the set of type URLs that it requests.
type fingerprint struct {
	meshConfig       bool
	telemetry        bool
	wasmPlugin       bool
	proxyConfig      bool
	v1               bool // of networking.istio.io
	trafficExtension bool
	workloadGroup    bool
}

// add adds a type URL and its collection.
func (f *fingerprint) add(url, collection string) {
	switch collection {
	case meshConfig:
		f.meshConfig = true
	case "telemetry.istio.io/Telemetry":
		f.telemetry = true
	case "extensions.istio.io/WasmPlugin":
		f.wasmPlugin = true
	case "networking.istio.io/ProxyConfig":
		f.proxyConfig = true
	case "networking.istio.io/WorkloadGroup":
		f.workloadGroup = true
	}
	// Any API group will do: only the kind matters.
	if strings.HasSuffix(collection, "/TrafficExtension") {
		f.trafficExtension = true
	}
	if strings.HasPrefix(url, "networking.istio.io/v1/") {
		f.v1 = true
	}
}

// profile returns the matching profile.
func (f *fingerprint) profile() *stream.Profile {
	switch {
	case !f.meshConfig:
		return tools
	case f.trafficExtension:
		return istio130
	case f.v1:
		return istio124
	case f.proxyConfig:
		return istio113
	case f.wasmPlugin:
		return istio112
	case f.telemetry:
		return istio110
	default:
		return istio19
	}
}

// complete reports whether further types cannot change the profile. Versions
// that request v1 request types in the order of their kinds' names,
// WorkloadGroup last (observed with 1.24.0 and the build of August 2026).
func (f *fingerprint) complete() bool {
	return !f.meshConfig || f.trafficExtension || f.v1 && f.workloadGroup
}
