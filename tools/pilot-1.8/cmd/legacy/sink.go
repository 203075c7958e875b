package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"math/rand"
	"net"
	"sort"
	"strconv"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	mcpapi "istio.io/api/mcp/v1alpha1"
	"istio.io/istio/pkg/config/schema/collections"
	"istio.io/istio/pkg/mcp/rate"
	"istio.io/istio/pkg/mcp/server"
	"istio.io/istio/pkg/mcp/sink"
	"istio.io/istio/pkg/mcp/testing/monitoring"
)

// publishedAnnotation holds when a resource was published, in nanoseconds of
// Unix time.
const publishedAnnotation = "published"

// client is one sink and what it holds.
type client struct {
	id       int
	nack     float64
	measure  bool
	delay    time.Duration
	mu       sync.Mutex
	random   *rand.Rand
	held     map[string]map[string]string // version by name, by collection
	applied  int
	partial  int // of these incremental
	refused  int
	objects  int
	newest   int64 // newest time of publication that was seen
	conns    []net.Conn
	accepted int
}

var errRefused = errors.New("refused on purpose")

// Apply implements sink.Updater.
func (c *client) Apply(change *sink.Change) error {
	now := time.Now().UnixNano()
	if c.delay > 0 {
		time.Sleep(c.delay)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.random.Float64() < c.nack {
		c.refused++
		return errRefused
	}
	held := c.held[change.Collection]
	if !change.Incremental || held == nil {
		held = make(map[string]string, len(change.Objects))
		c.held[change.Collection] = held
	} else {
		c.partial++
	}
	for _, name := range change.Removed {
		delete(held, name)
	}
	var published int64
	for _, o := range change.Objects {
		held[o.Metadata.Name] = o.Metadata.Version
		if c.measure {
			if at, err := strconv.ParseInt(o.Metadata.Annotations[publishedAnnotation], 10, 64); err == nil && at > published {
				published = at
			}
		}
	}
	c.applied++
	c.objects += len(change.Objects)
	if c.measure && published > c.newest {
		c.newest = published
		answer(map[string]int64{"published": published, "nanos": now - published})
	}
	return nil
}

// state is what a client tells about itself.
type state struct {
	Hash        string `json:"hash"` // over sorted "collection name version" lines
	Resources   int    `json:"resources"`
	Collections int    `json:"collections"` // that were answered
	Applied     int    `json:"applied"`
	Incremental int    `json:"incremental"`
	Refused     int    `json:"refused"`
	Objects     int    `json:"objects"`
	Streams     int    `json:"streams"`
}

func (c *client) state() state {
	c.mu.Lock()
	defer c.mu.Unlock()
	var lines []string
	for collection, held := range c.held {
		for name, version := range held {
			lines = append(lines, collection+" "+name+" "+version+"\n")
		}
	}
	sort.Strings(lines)
	sum := sha256.Sum256([]byte(strings.Join(lines, "")))
	return state{
		Hash: fmt.Sprintf("%x", sum), Resources: len(lines), Collections: len(c.held), Applied: c.applied, Incremental: c.partial, Refused: c.refused,
		Objects: c.objects, Streams: c.accepted,
	}
}

func runSink(args []string) error {
	flags := flag.NewFlagSet("sink", flag.ExitOnError)
	address := flags.String("address", "", "source to dial")
	listen := flags.String("listen", "", "address to be dialled at, for one sink in reverse mode")
	count := flags.Int("clients", 1, "number of sinks")
	incremental := flags.String("incremental", "none", "which sinks permit incremental responses: none, all, half")
	nack := flags.Float64("nack", 0, "share of responses to refuse")
	measure := flags.Bool("measure", false, "tell of each change when it was applied")
	size := flags.Int("max-size", 4<<20, "largest message to accept, in bytes")
	delay := flags.Duration("delay", 0, "how long to take over each response")
	if err := flags.Parse(args); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var clients []*client
	for i := 0; i < *count; i++ {
		c := &client{
			id: i, nack: *nack, measure: *measure, delay: *delay, random: rand.New(rand.NewSource(int64(i))), held: make(map[string]map[string]string),
		}
		clients = append(clients, c)
		var cols []sink.CollectionOptions
		for _, s := range collections.Pilot.All() {
			cols = append(cols, sink.CollectionOptions{
				Name: s.Name().String(), Incremental: *incremental == "all" || *incremental == "half" && i%2 == 0,
			})
		}
		options := &sink.Options{CollectionOptions: cols, Updater: c, ID: fmt.Sprintf("legacy-%d", i), Reporter: monitoring.NewInMemoryStatsContext()}
		if *listen != "" {
			l, err := net.Listen("tcp", *listen)
			if err != nil {
				return err
			}
			s := grpc.NewServer(grpc.MaxRecvMsgSize(*size))
			mcpapi.RegisterResourceSinkServer(s, sink.NewServer(options, &sink.ServerOptions{
				AuthChecker: server.NewAllowAllChecker(), RateLimiter: rate.NewRateLimiter(time.Millisecond, 1000).Create(),
			}))
			go func() { _ = s.Serve(&counting{l, c}) }()
			answer(map[string]string{"address": l.Addr().String()})
			continue
		}
		conn, err := grpc.Dial(*address, grpc.WithInsecure(), grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(*size)),
			grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) {
				conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", addr)
				if err == nil {
					c.opened(conn)
				}
				return conn, err
			}))
		if err != nil {
			return err
		}
		go sink.NewClient(mcpapi.NewResourceSourceClient(conn), options).Run(ctx)
	}
	return commands(func(line string) error {
		switch line {
		case "state":
			all := make([]state, 0, len(clients))
			for _, c := range clients {
				all = append(all, c.state())
			}
			answer(map[string]interface{}{"clients": all})
		case "break":
			for _, c := range clients {
				c.breakOff()
			}
			answer(map[string]bool{"ok": true})
		default:
			return fmt.Errorf("no such command: %q", line)
		}
		return nil
	})
}

func (c *client) opened(conn net.Conn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.conns = append(c.conns, conn)
	c.accepted++
}

// breakOff closes the connections.
func (c *client) breakOff() {
	c.mu.Lock()
	conns := c.conns
	c.conns = nil
	c.mu.Unlock()
	for _, conn := range conns {
		_ = conn.Close()
	}
}

// counting notes the connections that come in.
type counting struct {
	net.Listener
	c *client
}

func (l *counting) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err == nil {
		l.c.opened(conn)
	}
	return conn, err
}
