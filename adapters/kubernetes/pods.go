package kubernetes

import (
	"maps"
	"slices"
	"strings"

	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// sidecarLabel is the label, with the value istio, that Istio's injector gives
// a pod whose sidecar takes mutual TLS.
const sidecarLabel = "security.istio.io/tlsMode"

// podObject is the part of a Pod that matters.
type podObject struct {
	Metadata metadata `json:"metadata"`
	Spec     struct {
		ServiceAccount string `json:"serviceAccountName"`
	} `json:"spec"`
}

// pod is what endpoints get of a pod. Pods that are alike share one.
type pod struct {
	labels  map[string]string
	account string

	text string // which identifies it
	used int    // by how many pods
}

// pods is what is known of the pods: of those that exist, and of those that
// EndpointSlices refer to. A nil *pods knows nothing. It is used by one
// goroutine at a time, but for convert.
type pods struct {
	config Pods
	byName map[name]*podEntry
	alike  map[string]*pod // by text
}

// podEntry is one pod.
type podEntry struct {
	*pod        // nil before it is known
	gone bool   // and referred to still
	in   []name // the EndpointSlices that refer to it
}

func newPods(config Pods) *pods {
	return &pods{config: config, byName: map[name]*podEntry{}, alike: map[string]*pod{}}
}

// convert converts a Pod.
func (p *pods) convert(o *podObject) *pod {
	out := &pod{}
	var text strings.Builder
	for _, key := range slices.Sorted(maps.Keys(o.Metadata.Labels)) {
		if p.config.Labels.Match(key) {
			if out.labels == nil {
				out.labels = map[string]string{}
			}
			out.labels[key] = o.Metadata.Labels[key]
			text.WriteString(key + "=" + out.labels[key] + ",")
		}
	}
	if p.config.ServiceAccounts && o.Metadata.Labels[sidecarLabel] == "istio" {
		out.account = o.Metadata.Namespace + "/" + o.Spec.ServiceAccount
	}
	out.text = text.String() + out.account
	return out
}

// put takes a pod, and returns the EndpointSlices that are affected.
func (p *pods) put(n name, is *pod) []name {
	e := p.entry(n)
	e.gone = false
	if e.pod != nil && e.text == is.text {
		return nil
	}
	p.drop(e.pod)
	if p.alike[is.text] == nil {
		p.alike[is.text] = is
	}
	e.pod = p.alike[is.text]
	e.used++
	return e.in
}

func (p *pods) entry(n name) *podEntry {
	e := p.byName[n]
	if e == nil {
		e = &podEntry{}
		p.byName[n] = e
	}
	return e
}

// drop ends the use of what is known of a pod.
func (p *pods) drop(was *pod) {
	if was == nil {
		return
	}
	if was.used--; was.used == 0 {
		delete(p.alike, was.text)
	}
}

// remove takes the end of a pod. What is known of it stays for as long as it is
// an endpoint, which it may be a moment longer.
func (p *pods) remove(n name) {
	if e := p.byName[n]; e != nil {
		e.gone = true
		p.tidy(n, e)
	}
}

func (p *pods) tidy(n name, e *podEntry) {
	if len(e.in) == 0 && (e.gone || e.pod == nil) {
		p.drop(e.pod)
		delete(p.byName, n)
	}
}

// refer notes that an EndpointSlice has its endpoints. What is no pod is an
// address with a port, which no pod has for a name.
func (p *pods) refer(slice name, of *part) {
	if p == nil {
		return
	}
	for i := range of.instances {
		e := p.entry(name{slice.namespace, of.instances[i].ID})
		e.in = append(e.in, slice)
	}
}

// release ends one refer.
func (p *pods) release(slice name, of *part) {
	if p == nil {
		return
	}
	for i := range of.instances {
		n := name{slice.namespace, of.instances[i].ID}
		e := p.byName[n]
		if at := slices.Index(e.in, slice); at >= 0 {
			e.in = slices.Delete(e.in, at, at+1)
		}
		p.tidy(n, e)
	}
}

// describe adds what is known of the pod of an instance.
func (p *pods) describe(namespace string, in *registry.Instance) {
	if p == nil {
		return
	}
	if e := p.byName[name{namespace, in.ID}]; e != nil && e.pod != nil {
		in.Meta, in.ServiceAccount = e.labels, e.account
	}
}
