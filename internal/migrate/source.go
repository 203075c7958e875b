package migrate

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"strings"
	"sync"
	"time"

	"go.yaml.in/yaml/v3"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/encoding/protojson"
	mcp "istio.io/api/mcp/v1alpha1"
	networking "istio.io/api/networking/v1alpha3"
	sigsyaml "sigs.k8s.io/yaml"

	"github.com/isthmus-mesh/isthmus/internal/watch"
)

// Source is one side of a comparison: a file, or a server.
type Source struct {
	name string
	file bool
	dial []grpc.DialOption

	mu sync.Mutex
	// guarded by mu
	resources map[string]resource // by kind and name
	changes   int                 // so far
	last      time.Time           // time of the last change
}

// resource is a ServiceEntry or a WorkloadEntry.
type resource struct {
	name  string // "namespace/name"
	entry *networking.ServiceEntry
	work  *networking.WorkloadEntry
}

// Open returns the source of a name: an existing file, else an address,
// host:port of an xDS server or mcp://host:port of a server of the legacy Mesh
// Configuration Protocol, reached with these options. A file is read at once.
func Open(name string, dial ...grpc.DialOption) (*Source, error) {
	s := &Source{name: name, dial: dial, resources: map[string]resource{}}
	info, err := os.Stat(name)
	switch {
	case err == nil && info.Mode().IsRegular():
		s.file = true
		data, err := os.ReadFile(name)
		if err != nil {
			return nil, err
		}
		if err := s.read(data); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		return s, nil
	case err == nil:
		return nil, fmt.Errorf("%s: is not a file; give a file, or an address as host:port", name)
	}
	o := s.options(io.Discard)
	if err := o.Validate(); err != nil {
		return nil, fmt.Errorf("%s: there is no such file, and it is not an address: %w", name, err)
	}
	return s, nil
}

// options returns the options of a sink that follows the source.
func (s *Source) options(stderr io.Writer) watch.Options {
	o := watch.Options{Protocol: "sotw", Output: "json", Shape: "inline", Body: true, Stderr: stderr, Address: s.name, DialOptions: s.dial}
	// Old servers support only this version.
	o.Types = []string{"networking.istio.io/v1alpha3/ServiceEntry", "networking.istio.io/v1alpha3/WorkloadEntry"}
	if address, ok := strings.CutPrefix(s.name, "mcp://"); ok {
		o.Address, o.Protocol, o.Shape, o.Types = address, "mcp", "", nil
	}
	return o
}

// Run follows the source until ctx ends, which is no error. A file never
// changes.
func (s *Source) Run(ctx context.Context, stderr io.Writer) error {
	if s.file {
		<-ctx.Done()
		return nil
	}
	return watch.Run(ctx, s.options(stderr), s)
}

// Write parses lines of package watch.
func (s *Source) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for line := range bytes.Lines(p) {
		var l watch.Line
		if err := json.Unmarshal(line, &l); err != nil {
			return 0, err
		}
		s.changes++
		s.last = time.Now()
		key := l.Collection + " " + l.Name
		if i := strings.LastIndexByte(l.Collection, '/'); i >= 0 {
			key = strings.ToLower(strings.TrimSuffix(l.Collection[i+1:], "s")) + " " + l.Name
		}
		delete(s.resources, key)
		if len(l.Resource) == 0 {
			continue
		}
		res := &mcp.Resource{}
		if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(l.Resource, res); err != nil {
			return 0, err
		}
		body, err := res.GetBody().UnmarshalNew()
		if err != nil {
			return 0, err
		}
		r := resource{name: l.Name}
		switch b := body.(type) {
		case *networking.ServiceEntry:
			r.entry = b
		case *networking.WorkloadEntry:
			r.work = b
		}
		s.resources[key] = r
	}
	return len(p), nil
}

// Wait waits until the source has responded and then been silent for quiet.
func (s *Source) Wait(ctx context.Context, quiet time.Duration) error {
	if s.file {
		return nil
	}
	tick := time.NewTicker(quiet/10 + 1)
	defer tick.Stop()
	for {
		s.mu.Lock()
		there := s.changes > 0 && time.Since(s.last) >= quiet
		s.mu.Unlock()
		if there {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("%s: no complete answer: it serves nothing, or is not reached", s.name)
		}
	}
}

// read parses the ServiceEntries and WorkloadEntries of a YAML file: documents,
// or a List as written by kubectl.
func (s *Source) read(data []byte) error {
	dec := yaml.NewDecoder(bytes.NewReader(data))
	for n := 1; ; n++ {
		var doc map[string]any
		switch err := dec.Decode(&doc); {
		case errors.Is(err, io.EOF):
			if len(s.resources) == 0 {
				return errors.New("there is no ServiceEntry in it; give what kubectl get -o yaml or isthmus dump prints")
			}
			return nil
		case err != nil:
			return fmt.Errorf("document %d: %w", n, err)
		}
		items, _ := doc["items"].([]any)
		if items == nil {
			items = []any{doc}
		}
		for i, item := range items {
			if err := s.object(item); err != nil {
				return fmt.Errorf("document %d, item %d: %w", n, i, err)
			}
		}
	}
}

// object parses one Kubernetes object.
func (s *Source) object(item any) error {
	text, err := yaml.Marshal(item)
	if err != nil {
		return err
	}
	var o struct {
		Kind     string
		Metadata struct{ Name, Namespace string }
		Spec     json.RawMessage
	}
	if err := sigsyaml.Unmarshal(text, &o); err != nil {
		return err
	}
	r := resource{name: o.Metadata.Namespace + "/" + o.Metadata.Name}
	spec := protojson.UnmarshalOptions{DiscardUnknown: true}
	switch o.Kind {
	case "ServiceEntry":
		r.entry = &networking.ServiceEntry{}
		err = spec.Unmarshal(o.Spec, r.entry)
	case "WorkloadEntry":
		r.work = &networking.WorkloadEntry{}
		err = spec.Unmarshal(o.Spec, r.work)
	default:
		return nil
	}
	if err != nil {
		return fmt.Errorf("%s %s: %w", o.Kind, r.name, err)
	}
	s.resources[strings.ToLower(o.Kind)+" "+r.name] = r
	return nil
}

// snapshot returns the resources of the source and the number of changes so
// far.
func (s *Source) snapshot() (map[string]resource, int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.resources), s.changes
}
