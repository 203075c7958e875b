package validity

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"iter"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/txtar"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
	mcp "istio.io/api/mcp/v1alpha1"
	networking "istio.io/api/networking/v1alpha3"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testvalidation"
	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/kubernetes"
	"github.com/isthmus-mesh/isthmus/translate"
)

var (
	services = flag.Int("services", 1_000_000, "how many services TestRandomServices makes")
	first    = flag.Uint64("first", 1, "number of the first of them; a failure names the number")
)

// goldens yields the resources of the goldens of package translate, by file.
func goldens(t *testing.T) iter.Seq2[string, *mcp.Resource] {
	files, err := filepath.Glob("../../translate/testdata/*.txtar")
	if err != nil || len(files) == 0 {
		t.Fatalf("no goldens: %v", err)
	}
	return func(yield func(string, *mcp.Resource) bool) {
		for _, file := range files {
			archive, err := txtar.ParseFile(file)
			if err != nil {
				t.Fatal(err)
			}
			for _, f := range archive.Files {
				if f.Name != "out.yaml" {
					continue
				}
				for doc := range strings.SplitSeq("\n"+string(f.Data), "\n---\n") {
					text, err := yaml.YAMLToJSON([]byte(doc))
					if err != nil {
						t.Fatalf("%s: %v", file, err)
					}
					if string(text) == "null" { // comments only
						continue
					}
					res := &mcp.Resource{}
					if err := protojson.Unmarshal(text, res); err != nil {
						t.Fatalf("%s: %v\n%s", file, err, doc)
					}
					res.Metadata.CreateTime = timestamppb.New(translate.CreateTime) // goldens leave it out
					if !yield(filepath.Base(file), res) {
						return
					}
				}
			}
		}
	}
}

// writeResource hands over one resource of a file.
func (c *checker) writeResource(file string, res *mcp.Resource) {
	b, err := proto.Marshal(res)
	if err != nil {
		c.t.Fatal(err)
	}
	c.write(fmt.Sprintf("%s: %s", file, res.GetMetadata().GetName()), b)
}

// Every golden of package translate is valid.
func TestGoldens(t *testing.T) {
	testenv.SkipIfShort(t)
	v := startValidations(t)
	files := map[string]bool{}
	total := 0
	for file, res := range goldens(t) {
		v.writeResource(file, res)
		files[file] = true
		total++
	}
	v.wait()
	if total < len(files) {
		t.Errorf("only %d resources in %d goldens", total, len(files))
	}
}

// So is the stub of each golden's service that can have one.
func TestStubs(t *testing.T) {
	testenv.SkipIfShort(t)
	v := startValidations(t)
	stub := kubernetes.Stub{Meta: kubernetes.Meta{Consumer: "ambient"}, Waypoint: "waypoint"}
	made, without := 0, 0
	for file, res := range goldens(t) {
		entry := &networking.ServiceEntry{}
		if !res.GetBody().MessageIs(entry) {
			continue
		}
		if err := res.GetBody().UnmarshalTo(entry); err != nil {
			t.Fatal(err)
		}
		if len(entry.GetAddresses()) == 0 && entry.GetResolution() == networking.ServiceEntry_STATIC {
			entry.Addresses = []string{"241.0.0.1"} // the bridge's, for a host that is not a pattern
		}
		if err := res.GetBody().MarshalFrom(entry); err != nil {
			t.Fatal(err)
		}
		object, err := stub.Object(res)
		if err != nil {
			without++
			continue
		}
		made++
		text, err := json.Marshal(object.Object["spec"])
		entry = &networking.ServiceEntry{}
		if err == nil {
			err = protojson.Unmarshal(text, entry)
		}
		if err == nil {
			err = res.GetBody().MarshalFrom(entry)
		}
		if err != nil {
			t.Fatalf("%s: %v: %s", file, err, text)
		}
		res.Metadata.Name = object.GetNamespace() + "/" + object.GetName()
		v.writeResource(file, res)
	}
	v.wait()
	if made < 20 || without == 0 {
		t.Errorf("%d stubs, %d services without one", made, without)
	}
}

// What is broken is rejected: the validations do look at what they are given.
func TestBroken(t *testing.T) {
	testenv.SkipIfShort(t)
	for _, tool := range validations {
		t.Run(tool.String(), func(t *testing.T) {
			var in bytes.Buffer
			for _, spec := range []string{
				`{"hosts": ["a_b.example.org"], "ports": [{"number": 80, "name": "http", "protocol": "HTTP"}], "resolution": "STATIC"}`,
				`{"hosts": ["ok.example.org"], "ports": [{"number": 80, "name": "http", "protocol": "HTTP"}], "resolution": "STATIC"}`,
				`{"hosts": ["ok.example.org"], "ports": [{"number": 80, "name": "http", "protocol": "HTTP"}], "resolution": "STATIC", "endpoints": [{"address": "1.2.3.4", "labels": {"a": "b c"}}]}`,
			} {
				res := &mcp.Resource{}
				text := `{"metadata": {"name": "ns/n", "createTime": "2100-01-01T00:00:00Z"}, "body": {"@type": "type.googleapis.com/istio.networking.v1alpha3.ServiceEntry", ` + spec[1:] + `}`
				if err := protojson.Unmarshal([]byte(text), res); err != nil {
					t.Fatal(err)
				}
				b, err := proto.Marshal(res)
				if err != nil {
					t.Fatal(err)
				}
				in.Write(binary.BigEndian.AppendUint32(nil, uint32(len(b))))
				in.Write(b)
			}
			cmd := exec.CommandContext(t.Context(), tool.Binary(t))
			cmd.Stdin = &in
			out, err := cmd.Output()
			if err != nil {
				t.Fatal(err)
			}
			if got := string(out); strings.Count(got, "\n") != 3 || !strings.Contains(got, `{"index":0,`) || !strings.Contains(got, `{"index":2,`) || !strings.Contains(got, `{"read":3}`) {
				t.Errorf("it says\n%s\nwant the first and the third of three rejected", got)
			}
		})
	}
}

// Whatever a registry says, and however translate is configured, what comes out
// is valid: each resource by itself, and the ServiceEntry with its endpoints in
// it, as istiod gets it.
func TestRandomServices(t *testing.T) {
	testenv.SkipIfShort(t)
	begin := time.Now()
	v := startValidations(t)
	translators := translators(t)
	var group sync.WaitGroup
	workers := uint64(runtime.GOMAXPROCS(0))
	for w := range workers {
		group.Go(func() { // owned by the test, which waits below
			for n := *first + w; n < *first+uint64(*services) && !t.Failed(); n += workers {
				g := newGenerator(n)
				tr := translators[g.rand.IntN(len(translators))]
				svc, instances := g.service()
				r := tr.Service(svc, instances, nil)
				if r.Entry != nil {
					v.write(fmt.Sprintf("service %d", n), resources(t, r)...)
				}
			}
		})
	}
	group.Wait()
	v.wait()
	t.Logf("%d services became %d resources, each read by %d versions of Istio, in %v", *services, v.resources, len(validations), time.Since(begin).Round(time.Second))
	if v.resources < *services {
		t.Errorf("%d services became %d resources: the services are too broken to show anything", *services, v.resources)
	}
}

// resources returns all that a service becomes, and its ServiceEntry in the two
// shapes in which sinks get it.
func resources(t *testing.T, r *translate.Result) [][]byte {
	part, err := encode.Parse(r.Entry.Resource, nil, valid)
	if err != nil {
		t.Errorf("%s: the bridge would refuse it: %v", r.Entry.Name, err)
		return nil
	}
	inline := append([]byte(nil), part.Spec...)
	all := [][]byte{nil, composed(part, encode.AppendSelector(append([]byte(nil), part.Spec...), translate.SelectorValue(r.Entry.Name)))}
	for _, e := range r.Endpoints {
		p, err := encode.Parse(e.Resource, nil, valid)
		if err != nil {
			t.Errorf("%s: the bridge would refuse it: %v", e.Name, err)
			return nil
		}
		inline = encode.AppendEndpoint(inline, p.Spec, nil)
		all = append(all, e.Resource)
	}
	all[0] = composed(part, inline)
	if r.Rule != nil {
		if _, err := encode.Parse(r.Rule.Resource, nil, valid); err != nil {
			t.Errorf("%s: the bridge would refuse its DestinationRule: %v", r.Entry.Name, err)
		}
		all = append(all, r.Rule.Resource)
	}
	return all
}

func valid(_ *encode.Part, body proto.Message) error { return translate.ValidateBody(body) }

func composed(part *encode.Part, spec []byte) []byte {
	head := encode.Head{Metadata: part.Metadata, BodyURL: part.BodyURL, Spec: len(spec)}
	return append(head.Append(nil), spec...)
}

var validations = []testenv.Tool{testvalidation.OldestValidation, testvalidation.NewestValidation}

// checker hands resources to every validation.
type checker struct {
	t     *testing.T
	group sync.WaitGroup

	mu sync.Mutex
	// guarded by mu
	pipes   []io.WriteCloser
	buffers []*bufio.Writer

	// Apart from mu, which is held while a pipe is full.
	fromsMu sync.Mutex
	// guarded by fromsMu
	froms     []from // of resources, in order
	resources int
}

// from says what the resources from an index on came from.
type from struct {
	index int
	what  string
}

// maxRejected is the number of rejected resources that one test reports.
const maxRejected = 10

func startValidations(t *testing.T) *checker {
	t.Helper()
	c := &checker{t: t}
	for _, tool := range validations {
		cmd := exec.CommandContext(t.Context(), tool.Binary(t))
		in, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		c.pipes, c.buffers = append(c.pipes, in), append(c.buffers, bufio.NewWriterSize(in, 1<<20))
		c.group.Go(func() { // owned by the checker; ends when the program does
			read, rejected := -1, 0
			for lines := bufio.NewScanner(out); lines.Scan(); {
				var line struct {
					Index  int
					Reason string
					Read   *int
				}
				if err := json.Unmarshal(lines.Bytes(), &line); err != nil {
					t.Errorf("%s: %v: %s", tool, err, lines.Bytes())
					continue
				}
				if line.Read != nil {
					read = *line.Read
				} else if rejected++; rejected <= maxRejected {
					t.Errorf("%s rejects a resource of %s: %s", tool, c.origin(line.Index), line.Reason)
				}
			}
			if err := cmd.Wait(); err != nil {
				t.Errorf("%s: %v\n%s", tool, err, stderr.Bytes())
			}
			c.fromsMu.Lock()
			defer c.fromsMu.Unlock()
			if read != c.resources {
				t.Errorf("%s read %d of %d resources", tool, read, c.resources)
			}
		})
	}
	return c
}

// write hands over resources; what says where they are from.
func (c *checker) write(what string, resources ...[]byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.fromsMu.Lock()
	c.froms = append(c.froms, from{c.resources, what})
	c.resources += len(resources)
	c.fromsMu.Unlock()
	for _, b := range resources {
		size := binary.BigEndian.AppendUint32(nil, uint32(len(b)))
		for _, w := range c.buffers {
			_, err1 := w.Write(size)
			if _, err := w.Write(b); err1 != nil || err != nil {
				c.t.Errorf("hand over %s: %v", what, err)
				return
			}
		}
	}
}

func (c *checker) origin(index int) string {
	c.fromsMu.Lock()
	defer c.fromsMu.Unlock()
	what := "nothing"
	for _, f := range c.froms {
		if f.index > index {
			break
		}
		what = f.what
	}
	return what
}

// wait waits until everything was read.
func (c *checker) wait() {
	c.mu.Lock()
	for i, w := range c.buffers {
		if err := w.Flush(); err != nil {
			c.t.Errorf("hand over: %v", err)
		}
		c.pipes[i].Close()
	}
	c.mu.Unlock()
	c.group.Wait()
}
