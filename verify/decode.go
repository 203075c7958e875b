package verify

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strconv"
	"strings"

	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	mcp "istio.io/api/mcp/v1alpha1"
	networking "istio.io/api/networking/v1alpha3"
)

// RevisionLabel is the label in which a test puts the number of the truth that
// a resource or an instance stands for. Without it the order of two contents of
// one name is unknown.
const RevisionLabel = "isthmus-revision"

// SotW returns the event of a full response.
func SotW(r *discovery.DiscoveryResponse) *Event {
	e := &Event{Kind: Response, Type: r.GetTypeUrl(), Nonce: r.GetNonce(), Version: r.GetVersionInfo()}
	for _, a := range r.GetResources() {
		e.Resources = append(e.Resources, ofAny(a))
	}
	return e
}

// Delta returns the event of an incremental response.
func Delta(r *discovery.DeltaDiscoveryResponse) *Event {
	e := &Event{Kind: Response, Type: r.GetTypeUrl(), Nonce: r.GetNonce(), Version: r.GetSystemVersionInfo(), Incremental: true, Removed: r.GetRemovedResources()}
	for _, d := range r.GetResources() {
		res := ofAny(d.GetResource())
		switch {
		case res.Invalid != "":
		case res.Name != d.GetName():
			res.Invalid = fmt.Sprintf("its metadata has the name %q", res.Name)
		case res.Version != "" && res.Version != d.GetVersion():
			res.Invalid = fmt.Sprintf("its metadata has the version %q, and it was sent as %q", res.Version, d.GetVersion())
		}
		res.Name, res.Version = d.GetName(), d.GetVersion()
		e.Resources = append(e.Resources, res)
	}
	return e
}

// SotWRequest returns the event of a request of a sink of full responses.
func SotWRequest(r *discovery.DiscoveryRequest) *Event {
	return &Event{Kind: Request, Type: r.GetTypeUrl(), Nonce: r.GetResponseNonce(), Refused: r.GetErrorDetail().GetMessage(), Names: r.GetResourceNames()}
}

// DeltaRequest returns the event of a request of a sink of incremental
// responses.
func DeltaRequest(r *discovery.DeltaDiscoveryRequest) *Event {
	return &Event{
		Kind: Request, Type: r.GetTypeUrl(), Nonce: r.GetResponseNonce(), Refused: r.GetErrorDetail().GetMessage(),
		Names: r.GetResourceNamesSubscribe(), Dropped: r.GetResourceNamesUnsubscribe(), Versions: r.GetInitialResourceVersions(),
	}
}

// Legacy returns the event of a response of the legacy protocol, given its
// encoded resources.
func Legacy(collection, nonce, version string, incremental bool, resources [][]byte, removed []string) *Event {
	e := &Event{Kind: Response, Type: collection, Nonce: nonce, Version: version, Incremental: incremental, Removed: removed}
	for _, raw := range resources {
		e.Resources = append(e.Resources, ofBytes(raw))
	}
	return e
}

// resourceURL is the type of each resource of a response.
const resourceURL = "type.googleapis.com/istio.mcp.v1alpha1.Resource"

func ofAny(a *anypb.Any) Resource {
	if a.GetTypeUrl() != resourceURL {
		return Resource{Invalid: fmt.Sprintf("it is a %q", a.GetTypeUrl())}
	}
	return ofBytes(a.GetValue())
}

var deterministic = proto.MarshalOptions{Deterministic: true}

func ofBytes(raw []byte) Resource {
	m := new(mcp.Resource)
	r := Resource{Sum: sum(raw)}
	if err := proto.Unmarshal(raw, m); err != nil {
		r.Invalid = err.Error()
		return r
	}
	meta := m.GetMetadata()
	r.Name, r.Version, r.Revision = meta.GetName(), meta.GetVersion(), revision(meta.GetLabels())
	if meta == nil || m.GetBody() == nil {
		r.Invalid = "it has no metadata or no body"
		return r
	}
	meta.Version = ""
	content, err := deterministic.Marshal(m)
	if err != nil {
		r.Invalid = err.Error()
		return r
	}
	r.Content = sum(content)
	switch body := m.GetBody(); {
	case body.MessageIs((*networking.ServiceEntry)(nil)):
		entry := new(networking.ServiceEntry)
		if err := body.UnmarshalTo(entry); err != nil {
			r.Invalid = err.Error()
		}
		for _, w := range entry.GetEndpoints() {
			r.Endpoints = append(r.Endpoints, Endpoint{address(w), revision(w.GetLabels())})
		}
	case body.MessageIs((*networking.WorkloadEntry)(nil)):
		w := new(networking.WorkloadEntry)
		if err := body.UnmarshalTo(w); err != nil {
			r.Invalid = err.Error()
		}
		if n := revision(w.GetLabels()); n != 0 {
			r.Revision = n
		}
	}
	return r
}

func sum(b []byte) string {
	s := sha256.Sum256(b)
	return hex.EncodeToString(s[:8])
}

func revision(labels map[string]string) uint64 {
	n, err := strconv.ParseUint(labels[RevisionLabel], 10, 64)
	if err != nil {
		return 0
	}
	return n
}

func address(w *networking.WorkloadEntry) string {
	ports := make([]uint32, 0, len(w.GetPorts()))
	for _, n := range w.GetPorts() {
		ports = append(ports, n)
	}
	if len(ports) == 0 {
		return w.GetAddress()
	}
	slices.Sort(ports)
	words := make([]string, len(ports))
	for i, n := range ports {
		words[i] = strconv.FormatUint(uint64(n), 10)
	}
	return w.GetAddress() + ":" + strings.Join(words, ",")
}
