package plugin

import (
	"cmp"
	"context"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	mcp "istio.io/api/mcp/v1alpha1"
	networking "istio.io/api/networking/v1alpha3"

	"github.com/isthmus-mesh/isthmus/internal/clip"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
	"github.com/isthmus-mesh/isthmus/translate"
)

// Bounds of the answer to Explain.
const (
	maxExplained          = 20    // services
	maxExplainedInstances = 1_000 // of a service
	maxExplainedValues    = 64    // metadata and tags of an instance
	maxExplainedBytes     = 256   // of a value
	maxExplainedSize      = 8 << 20
)

// Recall tells the SDK where an adapter keeps what it passed to Set, so that an
// operator who asks about a service sees the registry's own words. from is
// called only then, from another goroutine, and must not call the catalog. An
// adapter that keeps nothing does not call Recall; neither does one that uses
// [Grace] or [Poll], which do.
func Recall(c Catalog, from func(registry.Key) (Snapshot, bool)) {
	recallWith(c, from, func(registry.Key) map[string]string { return nil })
}

// recaller is where an adapter keeps what it passed to Set. retained returns
// why it retains instances that the registry lacks, by ID.
type recaller struct {
	from     func(registry.Key) (Snapshot, bool)
	retained func(registry.Key) map[string]string
}

func recallWith(c Catalog, from func(registry.Key) (Snapshot, bool), retained func(registry.Key) map[string]string) {
	if p, ok := c.(*unionPart); ok { // whose Union knows what it passed to Set
		p.mu.Lock()
		defer p.mu.Unlock()
		p.retained[p.i] = retained
		return
	}
	if s, ok := c.(*sharded); ok {
		c = s.catalog
	}
	if c, ok := c.(*catalog); ok {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.recall = append(c.recall, recaller{from, retained})
	}
}

// Explain implements the contract.
func (s *server) Explain(ctx context.Context, req *pluginv1.ExplainRequest) (*pluginv1.ExplainResponse, error) {
	s.mu.Lock()
	c := s.catalog
	s.mu.Unlock()
	if c == nil {
		return nil, status.Error(codes.FailedPrecondition, "the plugin is not configured")
	}
	resp := &pluginv1.ExplainResponse{}
	size := 0
	for _, svc := range c.named(req.GetHost()) {
		if ctx.Err() != nil {
			return nil, status.FromContextError(ctx.Err()).Err()
		}
		e := c.explain(svc)
		if size += proto.Size(e); size > maxExplainedSize {
			e.More += uint64(len(e.GetInstances()))
			e.Instances = nil
		}
		resp.Services = append(resp.Services, e)
	}
	return resp, nil
}

// named returns the services with a host, or else with a name or a
// ServiceEntry of that name, in the order of their keys.
func (c *catalog) named(host string) []*service {
	c.mu.Lock()
	defer c.mu.Unlock()
	var hosts, names []*service
	for key, s := range c.services {
		switch {
		case s.result == nil:
		case s.result.HasHost(host):
			hosts = append(hosts, s)
		case strings.EqualFold(key.Name, host), entryName(s.result) == host, s.result.Entry == nil && namedLike(key, host):
			names = append(names, s)
		}
	}
	if len(hosts) == 0 {
		hosts = names
	}
	slices.SortFunc(hosts, func(a, b *service) int { return compareKeys(a.key, b.key) })
	return hosts[:min(len(hosts), maxExplained)]
}

// namedLike reports whether a service without a host has a key that the host
// begins with.
func namedLike(key registry.Key, host string) bool {
	first, _, _ := strings.Cut(host, ".")
	return strings.EqualFold(key.Name, first)
}

// explain describes one service.
func (c *catalog) explain(s *service) *pluginv1.ExplainedService {
	c.mu.Lock()
	recall, key, result := slices.Clone(c.recall), s.key, s.result
	serving := s.serving
	var own []string // what the catalog itself decided
	for _, source := range c.problems.found[clip.Text(serviceProblem(key), maxIDBytes)] {
		if source.source != any(s) {
			own = append(own, source.reason)
		}
	}
	c.mu.Unlock()

	out := &pluginv1.ExplainedService{Key: clip.Text(key.String(), maxIDBytes)}
	var e *translate.Explanation
	for _, r := range recall { // without a lock: it takes the adapter's
		if snapshot, ok := r.from(key); ok {
			e = c.translator.Explain(snapshot.Service, snapshot.Instances)
			missing := r.retained(key)
			for i := range e.Instances {
				if text := missing[e.Instances[i].ID]; text != "" {
					e.Instances[i].Steps = append(e.Instances[i].Steps, translate.Step{Rule: "remove_grace", Text: text})
				}
			}
			out.Original = true
			break
		}
	}
	if e == nil {
		e = retained(result)
	}
	out.Host = e.Host
	if e.Served && serving {
		out.Entry = e.Name
	}
	out.Steps = stepsOf(e.Steps)
	slices.Sort(own)
	for _, reason := range own {
		out.Steps = append(out.Steps, &pluginv1.ExplainedStep{Rule: cmp.Or(translate.FieldOf(reason), "registry"), Text: clip.Text(redact(reason), maxReasonBytes)})
	}
	for i := range e.Instances {
		if i == maxExplainedInstances {
			out.More = uint64(len(e.Instances) - i)
			break
		}
		out.Instances = append(out.Instances, explainedInstance(&e.Instances[i], out.GetOriginal(), serving))
	}
	return out
}

// retained describes a service by its translation alone.
func retained(r *translate.Result) *translate.Explanation {
	e := &translate.Explanation{Host: r.Host(), Name: entryName(r), Served: r.Entry != nil}
	for endpoint := range r.Each() {
		var res mcp.Resource
		var we networking.WorkloadEntry
		inst := translate.ExplainedInstance{Instance: registry.Instance{ID: endpoint.Name}, Resource: endpoint.Name}
		if proto.Unmarshal(endpoint.Resource, &res) == nil && res.GetBody().UnmarshalTo(&we) == nil {
			inst.Address, inst.Meta = we.GetAddress(), we.GetLabels()
			for name, number := range we.GetPorts() {
				inst.Ports = append(inst.Ports, registry.Port{Name: name, Number: int(number)})
			}
			slices.SortFunc(inst.Ports, func(a, b registry.Port) int { return strings.Compare(a.Name, b.Name) })
			if w := we.GetWeight(); w > 0 {
				inst.Weight = new(float64(w))
			}
			inst.Locality.Region = we.GetLocality()
		}
		e.Instances = append(e.Instances, inst)
	}
	for _, p := range slices.Concat(r.LeftOut, r.Problems) {
		step := translate.Step{Rule: cmp.Or(translate.FieldOf(p.Reason), "registry"), Text: p.Reason}
		if id, ok := strings.CutPrefix(p.ID, "instance "); ok {
			e.Instances = append(e.Instances, translate.ExplainedInstance{Instance: registry.Instance{ID: id}, Steps: []translate.Step{step}})
			continue
		}
		e.Steps = append(e.Steps, step)
	}
	return e
}

func stepsOf(steps []translate.Step) []*pluginv1.ExplainedStep {
	out := make([]*pluginv1.ExplainedStep, 0, len(steps))
	for _, s := range steps {
		out = append(out, &pluginv1.ExplainedStep{Rule: s.Rule, Subject: clip.Text(s.Subject, maxIDBytes), Text: clip.Text(redact(s.Text), maxReasonBytes)})
	}
	return out
}

func explainedInstance(i *translate.ExplainedInstance, original, serving bool) *pluginv1.ExplainedInstance {
	value := func(s string) string { return clip.Text(redact(s), maxExplainedBytes) }
	out := &pluginv1.ExplainedInstance{
		Id: clip.Text(i.ID, maxIDBytes), Address: value(i.Address), Disabled: i.Disabled, Node: value(i.Node),
		Locality: value(strings.TrimRight(i.Locality.Region+"/"+i.Locality.Zone+"/"+i.Locality.SubZone, "/")),
		Steps:    stepsOf(i.Steps),
	}
	if original {
		out.Health = i.Health.String()
	}
	if serving {
		out.Resource = i.Resource
	}
	if i.Weight != nil {
		out.Weight = strconv.FormatFloat(*i.Weight, 'g', -1, 64)
	}
	for _, p := range i.Ports[:min(len(i.Ports), maxExplainedValues)] {
		out.Ports = append(out.Ports, value(strings.Join(strings.Fields(fmt.Sprintf("%s %d %s", p.Name, p.Number, p.Protocol)), " ")))
	}
	for _, tag := range i.Tags[:min(len(i.Tags), maxExplainedValues)] {
		out.Tags = append(out.Tags, value(tag))
	}
	out.Meta = make(map[string]string, min(len(i.Meta), maxExplainedValues))
	for k, v := range i.Meta {
		if len(out.Meta) == maxExplainedValues {
			break
		}
		if secretKey.MatchString(k) {
			v = hidden
		}
		out.Meta[value(k)] = value(v)
	}
	return out
}

// secretKey matches names of metadata whose values are not shown: some
// frameworks register credentials, such as Spring Boot Admin's user.password.
var secretKey = regexp.MustCompile(`(?i)passw|secret|token|credential|private|api[-_.]?key|auth`)
