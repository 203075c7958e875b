package watch

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	statuspb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/structpb"
	mcp "istio.io/api/mcp/v1alpha1"
	_ "istio.io/api/networking/v1alpha3" // registers bodies, for Options.Body
	_ "istio.io/api/networking/v1beta1"  // likewise
	_ "istio.io/api/security/v1beta1"    // likewise

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/verify"
)

// DefaultTypes are the type URLs requested if [Options] names none.
var DefaultTypes = []string{"networking.istio.io/v1/ServiceEntry", "networking.istio.io/v1/WorkloadEntry"}

// Bounds of the back-off between streams. It grows by half with each failure; a
// response resets it.
const (
	minWait = 100 * time.Millisecond
	maxWait = 5 * time.Second
)

// Options are the options of a watch. Only Address is required.
type Options struct {
	// Address is the address of the xDS server: host:port or another gRPC
	// target.
	Address string
	// Protocol is "sotw", "delta", or "mcp" for the legacy protocol of Istio
	// 1.1 to 1.8; "" is delta.
	Protocol string
	// Incremental permits incremental responses; mcp only.
	Incremental bool
	// SinkID is the node id; nil selects one with the host and the process. Mcp
	// only.
	SinkID *string
	// Listen is the address to listen on in reverse mode, instead of Address;
	// mcp only.
	Listen string
	// Output is "text" or "json"; "" is text.
	Output string
	// Shape is "inline" or "workload"; "" selects the server's default: inline
	// for sotw, workload for delta.
	Shape string
	// Body prints the resources as well.
	Body bool
	// ChangesOnly omits what the first response of each type has. In text these
	// resources are one line otherwise, unless they are few.
	ChangesOnly bool
	// Host and Namespace, unless empty, are patterns of what is printed, as of
	// [path.Match]: the hosts of a ServiceEntry, those of the ServiceEntry of a
	// WorkloadEntry, and the namespace. With Host nothing is printed of kinds
	// without hosts.
	Host, Namespace string
	// Registry, unless empty, is a pattern likewise, of the registries whose
	// resources are printed. It needs a server that says whose they are, which
	// Isthmus does, and sotw or delta.
	Registry string
	// Color colours the output "text".
	Color bool
	// Types are the type URLs to subscribe to; empty selects [DefaultTypes].
	Types []string
	// Stderr receives a line when a stream ends, with the cure, and when a
	// resource cannot be decoded. A reason is repeated after a minute at the
	// earliest. Nil discards the lines.
	Stderr io.Writer
	// Record receives what is sent and received as lines of a recording, for
	// package verify. Nil records nothing.
	Record io.Writer
	// DialOptions are added to the options of the connection.
	DialOptions []grpc.DialOption
}

// withDefaults returns the options with defaults for missing values.
func (o Options) withDefaults() Options {
	o.Protocol, o.Output = cmp.Or(o.Protocol, "delta"), cmp.Or(o.Output, "text")
	switch {
	case len(o.Types) > 0:
	case o.Protocol == "mcp":
		o.Types = DefaultCollections
	default:
		o.Types = DefaultTypes
	}
	if o.Stderr == nil {
		o.Stderr = io.Discard
	}
	return o
}

// Validate returns all errors of the options, by the names of the program's
// flags.
func (o Options) Validate() error {
	o = o.withDefaults()
	var errs []error
	check := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	check(o.Address == "" || o.Listen == "", "--listen: is for reverse mode, in which there is no --address")
	check(o.Listen == "" && !o.Incremental && o.SinkID == nil || o.Protocol == "mcp", "--listen, --incremental and the id of a sink need the protocol mcp: add --protocol mcp")
	check(o.Shape == "" || o.Protocol != "mcp", "--shape: the protocol mcp has no choice")
	check(o.Registry == "" || o.Protocol != "mcp", "--registry: the protocol mcp does not say whose a resource is; choose another with --protocol")
	check(o.Address != "" || o.Listen != "", "--address: is missing; host:port is needed, for example --address 127.0.0.1:15051")
	check(o.Address == "" || isTarget(o.Address), "--address %s: must be host:port, for example 127.0.0.1:15051", o.Address)
	check(o.Listen == "" || isHostPort(o.Listen), "--listen %s: must be host:port, for example 127.0.0.1:9901, or :9901 for all addresses of the machine", o.Listen)
	check(o.Protocol == "sotw" || o.Protocol == "delta" || o.Protocol == "mcp", "--protocol %s: must be sotw, delta or mcp", o.Protocol)
	check(o.Output == "text" || o.Output == "json", "--output %s: must be text or json", o.Output)
	check(o.Shape == "" || o.Shape == "inline" || o.Shape == "workload", "--shape %s: must be inline or workload", o.Shape)
	for _, p := range []struct{ flag, pattern string }{{"--host", o.Host}, {"--namespace", o.Namespace}, {"--registry", o.Registry}} {
		_, err := path.Match(p.pattern, "")
		check(err == nil, `%s %s: is not a pattern: a [ needs its ], and a \ something behind it`, p.flag, p.pattern)
	}
	for i, t := range o.Types {
		if o.Protocol == "mcp" {
			check(parts(t) > 2, "--type %q: must be a collection, for example %s", t, DefaultCollections[0])
		} else {
			check(parts(t) == 3 || parts(t) == 2 && strings.HasPrefix(t, "type.googleapis.com/"), "--type %q: must be a type URL, GROUP/VERSION/KIND, for example %s", t, DefaultTypes[0])
		}
		check(!slices.Contains(o.Types[:i], t), "--type %q: is there twice", t)
	}
	return errors.Join(errs...)
}

// isTarget reports whether gRPC can dial s: host:port, unix:PATH, or a target
// with a scheme that gRPC supports, such as dns:///host:port.
func isTarget(s string) bool {
	if path, ok := strings.CutPrefix(s, "unix:"); ok {
		return path != ""
	}
	if scheme, _, ok := strings.Cut(s, "://"); ok {
		return resolver.Get(scheme) != nil
	}
	host, _, _ := net.SplitHostPort(s)
	return isHostPort(s) && host != "" && !strings.HasSuffix(s, ":0")
}

func isHostPort(s string) bool {
	_, port, err := net.SplitHostPort(s)
	if err == nil {
		_, err = strconv.ParseUint(port, 10, 16)
	}
	return err == nil
}

// parts returns the number of words between the slashes of s, or 0 if one of
// them is empty or contains a space.
func parts(s string) int {
	words := strings.Split(s, "/")
	if slices.Contains(words, "") || strings.ContainsAny(s, " \t\n") {
		return 0
	}
	return len(words)
}

// Line is one change in the output "json".
type Line struct {
	// Time is when the response arrived.
	Time time.Time `json:"time"`
	// Push numbers the responses of all streams of a run, from 1.
	Push int `json:"push"`
	// Collection is the collection, such as networking.istio.io/WorkloadEntry.
	Collection string `json:"collection"`
	// Name is the name of the resource, "namespace/name".
	Name string `json:"name"`
	// Version is the version of the resource; empty for a removal.
	Version string `json:"version"`
	// Op is "upsert" or "remove".
	Op string `json:"op"`
	// Registry is whose it is; only with [Options.Registry].
	Registry string `json:"registry,omitempty"`
	// Resource is the resource as protobuf JSON; only with [Options.Body].
	Resource json.RawMessage `json:"resource,omitempty"`
}

// Values of [Line.Op].
const (
	opUpsert = "upsert"
	opRemove = "remove"
)

// Run prints changes to w until ctx ends, and returns nil then. The error is
// that of invalid options or of writing.
func Run(ctx context.Context, o Options, w io.Writer) error {
	if err := o.Validate(); err != nil {
		return err
	}
	o = o.withDefaults()
	wa := &watcher{o: o, w: w, have: make(map[string]map[string]string), known: newKnown(o)}
	for _, url := range o.Types {
		wa.have[url] = make(map[string]string)
	}
	if o.Listen != "" {
		return wa.listen(ctx)
	}
	wait := minWait
	var told string // the reason printed last, and when
	var toldAt time.Time
	for {
		pushes := wa.pushes
		err := wa.connect(ctx)
		if ctx.Err() != nil {
			return nil //nolint:nilerr // what ended the stream is the end of the context
		}
		if e, ok := errors.AsType[*writeError](err); ok {
			return e
		}
		if wa.pushes > pushes {
			wait, told = minWait, ""
		}
		pause := wait/2 + rand.N(wait/2)
		if why := wa.reason(err); why != told || time.Since(toldAt) >= repeatAfter {
			fmt.Fprintf(o.Stderr, "%s: %s; connecting again until it answers\n", o.Address, why)
			told, toldAt = why, time.Now()
		}
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return nil
		}
		wait = min(wait*3/2, maxWait)
	}
}

// repeatAfter is the least time between two lines with the same reason.
const repeatAfter = time.Minute

// whereToLook ends messages about an address without a bridge.
const whereToLook = `is this the address after xds= in the line "serving" of the bridge's log?`

// grpcError is implemented by errors of gRPC calls.
type grpcError interface {
	error
	GRPCStatus() *status.Status
}

// reason explains why there is no stream, with the cure if it is known.
func (wa *watcher) reason(err error) string {
	e, ok := errors.AsType[grpcError](err)
	if !ok {
		return err.Error()
	}
	st := e.GRPCStatus()
	text := st.Message()
	has := func(words ...string) bool {
		return slices.ContainsFunc(words, func(w string) bool { return strings.Contains(text, w) })
	}
	switch {
	case has("name resolver error", "produced zero addresses", "no such host"):
		return "the name of the host is not known (" + text + "): check --address"
	case has("connection refused"):
		return "nothing listens there (connection refused): is the bridge running, and " + whereToLook
	case has("looked like an HTTP/1.1 header"):
		return "what answers there speaks HTTP/1.1 and not gRPC: " + whereToLook
	case has("server preface"):
		return "what answers there does not speak gRPC without TLS (" + text + "): " + whereToLook
	case has("i/o timeout", "no route to host", "network is unreachable"), st.Code() == codes.DeadlineExceeded:
		return "there is no answer (" + text + "): check --address, the network and firewalls"
	case st.Code() == codes.Unimplemented:
		return "the server does not have the protocol " + wa.o.Protocol + ": choose another with --protocol (" + text + ")"
	default:
		return text
	}
}

// writeError is an error that ends a watch.
type writeError struct{ err error }

func (e *writeError) Error() string { return "write: " + e.err.Error() }
func (e *writeError) Unwrap() error { return e.err }

// watcher is the state of a run, across streams.
type watcher struct {
	o      Options
	w      io.Writer
	pushes int
	have   map[string]map[string]string // version, or a substitute, by type URL and name
	known  *known
	untold bool // it was said that the server does not say whose resources are
	stream int  // number of the current stream, for the recording
}

// record adds an event of the current stream to the recording.
func (wa *watcher) record(e *verify.Event) error {
	if wa.o.Record == nil {
		return nil
	}
	e.Time, e.Stream = time.Now(), wa.stream
	line, err := e.Append(nil)
	if err != nil {
		return fmt.Errorf("record: %w", err)
	}
	if _, err := wa.o.Record.Write(line); err != nil {
		return &writeError{err}
	}
	return nil
}

// recordOpen begins a stream in the recording. The returned function ends it.
func (wa *watcher) recordOpen() (end func(error) error, err error) {
	wa.stream++
	err = wa.record(&verify.Event{Kind: verify.Open, Protocol: wa.o.Protocol, Shape: wa.o.Shape})
	return func(why error) error {
		if err := wa.record(&verify.Event{Kind: verify.End, Reason: fmt.Sprint(why)}); err != nil {
			return errors.Join(why, err)
		}
		return why
	}, err
}

// connect opens a stream and prints its responses until it ends.
func (wa *watcher) connect(ctx context.Context) (err error) {
	options := append([]grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(math.MaxInt32)),
		// One response of a large mesh has tens of MB.
		grpc.WithInitialWindowSize(8 << 20), grpc.WithInitialConnWindowSize(8 << 20),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 30 * time.Second, Timeout: 20 * time.Second}),
	}, wa.o.DialOptions...)
	conn, err := grpc.NewClient(wa.o.Address, options...)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // ends the stream
	client := discovery.NewAggregatedDiscoveryServiceClient(conn)
	if wa.o.Protocol == "mcp" {
		return wa.mcp(ctx, conn)
	}
	if wa.o.Protocol == "delta" {
		return wa.delta(ctx, client)
	}
	return wa.sotw(ctx, client)
}

func (wa *watcher) node() *core.Node {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	metadata := make(map[string]*structpb.Value)
	if wa.o.Shape != "" {
		metadata["ISTHMUS_SHAPE"] = structpb.NewStringValue(wa.o.Shape)
	}
	if wa.o.Registry != "" {
		metadata["ISTHMUS_REGISTRY"] = structpb.NewStringValue("true")
	}
	return &core.Node{Id: fmt.Sprintf("isthmus-watch~%s~%d", host, os.Getpid()), Metadata: &structpb.Struct{Fields: metadata}}
}

func (wa *watcher) sotw(ctx context.Context, client discovery.AggregatedDiscoveryServiceClient) (err error) {
	stream, err := client.StreamAggregatedResources(ctx)
	if err != nil {
		return err
	}
	end, err := wa.recordOpen()
	if err != nil {
		return err
	}
	defer func() { err = end(err) }()
	send := func(req *discovery.DiscoveryRequest) error {
		if err := wa.record(verify.SotWRequest(req)); err != nil {
			return err
		}
		return stream.Send(req)
	}
	for i, url := range wa.o.Types {
		req := &discovery.DiscoveryRequest{TypeUrl: url}
		if i == 0 {
			req.Node = wa.node()
		}
		if err := send(req); err != nil {
			return ended(stream, err)
		}
	}
	wa.tellHeld(stream)
	accepted := make(map[string]string) // version by type URL
	for {
		r, err := stream.Recv()
		if err != nil {
			return err
		}
		now := time.Now()
		wa.pushes++
		if err := wa.record(verify.SotW(r)); err != nil {
			return err
		}
		req := &discovery.DiscoveryRequest{TypeUrl: r.GetTypeUrl(), ResponseNonce: r.GetNonce()}
		if err := wa.all(now, r); err == nil {
			accepted[r.GetTypeUrl()] = r.GetVersionInfo()
		} else if req.ErrorDetail, err = wa.refusal(r.GetTypeUrl(), err); err != nil {
			return err
		}
		req.VersionInfo = accepted[r.GetTypeUrl()]
		if err := send(req); err != nil {
			return ended(stream, err)
		}
	}
}

func (wa *watcher) delta(ctx context.Context, client discovery.AggregatedDiscoveryServiceClient) (err error) {
	stream, err := client.DeltaAggregatedResources(ctx)
	if err != nil {
		return err
	}
	end, err := wa.recordOpen()
	if err != nil {
		return err
	}
	defer func() { err = end(err) }()
	send := func(req *discovery.DeltaDiscoveryRequest) error {
		if err := wa.record(verify.DeltaRequest(req)); err != nil {
			return err
		}
		return stream.Send(req)
	}
	for i, url := range wa.o.Types {
		req := &discovery.DeltaDiscoveryRequest{TypeUrl: url, InitialResourceVersions: wa.have[url]}
		if i == 0 {
			req.Node = wa.node()
		}
		if err := send(req); err != nil {
			return ended(stream, err)
		}
	}
	wa.tellHeld(stream)
	for {
		r, err := stream.Recv()
		if err != nil {
			return err
		}
		now := time.Now()
		wa.pushes++
		if err := wa.record(verify.Delta(r)); err != nil {
			return err
		}
		req := &discovery.DeltaDiscoveryRequest{TypeUrl: r.GetTypeUrl(), ResponseNonce: r.GetNonce()}
		if err := wa.some(now, r); err != nil {
			if req.ErrorDetail, err = wa.refusal(r.GetTypeUrl(), err); err != nil {
				return err
			}
		}
		if err := send(req); err != nil {
			return ended(stream, err)
		}
	}
}

// ended returns why a stream ended; only receiving reports it.
func ended[M any](stream interface{ Recv() (M, error) }, err error) error {
	if !errors.Is(err, io.EOF) {
		return err
	}
	for {
		if _, err := stream.Recv(); err != nil {
			return err
		}
	}
}

// refusal returns the NACK for an error of a response. It returns an error of
// writing as it is.
func (wa *watcher) refusal(url string, err error) (*statuspb.Status, error) {
	if _, ok := errors.AsType[*writeError](err); ok {
		return nil, err
	}
	fmt.Fprintf(wa.o.Stderr, "%s: push %d refused: %v\n", url, wa.pushes, err)
	return &statuspb.Status{Code: int32(codes.InvalidArgument), Message: err.Error()}, nil
}

var errNotAsked = errors.New("a type that was not asked for")

// all handles a full response. One that does not decode changes nothing.
func (wa *watcher) all(now time.Time, r *discovery.DiscoveryResponse) error {
	had, ok := wa.have[r.GetTypeUrl()]
	if !ok {
		return errNotAsked
	}
	have := make(map[string]string, len(r.GetResources()))
	var changed []change
	for _, a := range r.GetResources() {
		c, err := decode(a)
		if err != nil {
			return err
		}
		have[c.name] = c.key
		if had[c.name] != c.key {
			changed = append(changed, c)
		}
	}
	slices.SortFunc(changed, func(a, b change) int { return strings.Compare(a.name, b.name) })
	var removed []string
	for name := range had {
		if _, still := have[name]; !still {
			removed = append(removed, name)
		}
	}
	slices.Sort(removed)
	wa.have[r.GetTypeUrl()] = have
	return wa.print(now, r.GetTypeUrl(), changed, removed)
}

// some handles an incremental response. One that does not decode changes
// nothing.
func (wa *watcher) some(now time.Time, r *discovery.DeltaDiscoveryResponse) error {
	have, ok := wa.have[r.GetTypeUrl()]
	if !ok {
		return errNotAsked
	}
	changed := make([]change, 0, len(r.GetResources()))
	for _, d := range r.GetResources() {
		c, err := decode(d.GetResource())
		if err != nil {
			return fmt.Errorf("resource %q: %w", d.GetName(), err)
		}
		c.name, c.version, c.key = d.GetName(), d.GetVersion(), d.GetVersion()
		changed = append(changed, c)
	}
	changed = slices.DeleteFunc(changed, func(c change) bool {
		was, had := have[c.name]
		have[c.name] = c.key
		return had && was == c.key
	})
	var removed []string
	for _, name := range r.GetRemovedResources() {
		if _, had := have[name]; had {
			delete(have, name)
			removed = append(removed, name)
		}
	}
	return wa.print(now, r.GetTypeUrl(), changed, removed)
}

// change is a received resource.
type change struct {
	name    string
	version string
	key     string // the version, or a hash of the content if there is none
	res     *mcp.Resource
}

// registryAnnotation says whose a resource is.
const registryAnnotation = "isthmus.io/registry"

// registry returns whose the resource is, "" if that is not said.
func (c *change) registry() string { return c.res.GetMetadata().GetAnnotations()[registryAnnotation] }

func decode(a *anypb.Any) (change, error) {
	res := &mcp.Resource{}
	if err := a.UnmarshalTo(res); err != nil {
		return change{}, err
	}
	c := change{name: res.GetMetadata().GetName(), version: res.GetMetadata().GetVersion(), res: res}
	if c.key = c.version; c.key == "" {
		sum := sha256.Sum256(a.GetValue())
		c.key = fmt.Sprintf("sha256:%x", sum[:8])
	}
	return c, nil
}

// print writes a line per change, in one call.
func (wa *watcher) print(now time.Time, url string, changed []change, removed []string) error {
	var b strings.Builder
	first := wa.known.first(url)
	if wa.o.Registry != "" && !wa.untold && slices.ContainsFunc(changed, func(c change) bool { return c.registry() == "" }) {
		wa.untold = true
		fmt.Fprintf(wa.o.Stderr, "%s: the server does not say whose resources are; --registry needs an Isthmus of this version or later\n", url)
	}
	changed, removed = wa.known.note(collection.OfTypeURL(url), changed, removed)
	switch {
	case first && wa.o.ChangesOnly:
		changed = nil
	case first && wa.o.Output == "text" && len(changed) > maxFirst:
		fmt.Fprintf(&b, "%s  push %-4d  %s\n", now.Format("15:04:05.000"), wa.pushes, wa.known.summary(collection.OfTypeURL(url), len(changed)))
		changed = nil
	}
	kind := url[strings.LastIndexByte(url, '/')+1:]
	for _, c := range changed {
		l := Line{Time: now, Push: wa.pushes, Collection: collection.OfTypeURL(url), Name: c.name, Version: c.version, Op: opUpsert, Registry: wa.known.registries[c.name+" "+kind]}
		if wa.o.Body {
			l.Resource = wa.body(c)
		}
		if err := wa.line(&b, &l); err != nil {
			return err
		}
	}
	for _, name := range removed {
		l := Line{Time: now, Push: wa.pushes, Collection: collection.OfTypeURL(url), Name: name, Op: opRemove, Registry: wa.known.left[name+" "+kind]}
		if err := wa.line(&b, &l); err != nil {
			return err
		}
	}
	if b.Len() == 0 {
		return nil
	}
	if _, err := io.WriteString(wa.w, b.String()); err != nil {
		return &writeError{err}
	}
	return nil
}

// body returns a resource as JSON, nil if the program does not know its kind.
func (wa *watcher) body(c change) json.RawMessage {
	raw, err := protojson.Marshal(c.res)
	if err != nil {
		fmt.Fprintf(wa.o.Stderr, "%s: printed without its body: %v\n", c.name, err)
		return nil
	}
	return raw
}

func (wa *watcher) line(b *strings.Builder, l *Line) error {
	raw, err := json.Marshal(l) // compacts the body too
	if err != nil {
		return fmt.Errorf("resource %q: %w", l.Name, err)
	}
	if wa.o.Output == "json" {
		b.Write(raw)
		b.WriteByte('\n')
		return nil
	}
	kind := l.Collection[strings.LastIndex(l.Collection, "/")+1:]
	fmt.Fprintf(b, "%s  push %-4d  %s  %-13s  %s", l.Time.Format("15:04:05.000"), l.Push, wa.colored(l.Op), kind, l.Name)
	if l.Registry != "" {
		b.WriteString("  of " + l.Registry)
	}
	if said := wa.known.said[l.Name+" "+kind]; said != "" {
		b.WriteString("  " + said)
	}
	if l.Version != "" {
		b.WriteString("  " + l.Version)
	}
	if len(l.Resource) > 0 {
		var compact struct {
			Resource json.RawMessage `json:"resource"`
		}
		if err := json.Unmarshal(raw, &compact); err != nil {
			return fmt.Errorf("resource %q: %w", l.Name, err)
		}
		b.WriteString("  ")
		b.Write(compact.Resource)
	}
	b.WriteByte('\n')
	return nil
}
