package bench

import (
	"context"
	"net"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nacos-group/nacos-sdk-go/v2/model"
	"golang.org/x/sync/errgroup"

	"github.com/isthmus-mesh/isthmus/adapters/sim"
	"github.com/isthmus-mesh/isthmus/internal/nacosapp"
)

// nacos is a Nacos server without access control.
type nacos struct {
	o Options
	// app registers; what it has registered goes with its connection. The bare
	// subscriber has a connection of its own.
	app, subscriber *nacosapp.Client

	mu   sync.Mutex // guards what is below
	told map[string]func(time.Time, []int64)
}

// grpcOffset is how far the port for gRPC is from the one for HTTP.
const grpcOffset = 1000

func newNacos(ctx context.Context, o Options) (_ *nacos, err error) {
	u, err := url.Parse(o.Address)
	if err != nil {
		return nil, err
	}
	port := 8848
	if u.Port() != "" {
		if port, err = strconv.Atoi(u.Port()); err != nil {
			return nil, err
		}
	}
	at := net.JoinHostPort(u.Hostname(), strconv.Itoa(port+grpcOffset))
	n := &nacos{o: o, told: make(map[string]func(time.Time, []int64))}
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	if n.app, err = nacosapp.Dial(ctx, at, nil); err != nil {
		return nil, err
	}
	if n.subscriber, err = nacosapp.Dial(ctx, at, nil); err != nil {
		n.app.Close()
		return nil, err
	}
	n.subscriber.OnPush(n.push)
	return n, nil
}

// The namespace and the group of the services. The group is the benchmark's.
const (
	nacosNamespace = "public"
	nacosGroup     = "ISTHMUS_BENCH"
)

func (n *nacos) registry() map[string]any {
	return map[string]any{"type": "nacos", "config": map[string]any{"servers": []string{n.o.Address}, "groups": []string{nacosGroup}}}
}

func (n *nacos) register(ctx context.Context, s *service) error {
	all := make([]model.Instance, len(s.stamps))
	for i := range all {
		meta := map[string]string{"protocol": "http"}
		if s.stamps[i] > 0 {
			meta[sim.ChangedAt] = strconv.FormatInt(s.stamps[i], 10)
		}
		all[i] = model.Instance{
			Ip: s.address(i), Port: 8080, Weight: 1, Healthy: true, Enable: true, Ephemeral: true, ClusterName: "DEFAULT", Metadata: meta,
		}
	}
	return n.app.Register(ctx, nacosNamespace, nacosGroup, s.name, all...)
}

func (n *nacos) put(ctx context.Context, services ...*service) error {
	all, ctx := errgroup.WithContext(ctx)
	all.SetLimit(8)
	for _, s := range services {
		all.Go(func() error { return n.register(ctx, s) })
	}
	return all.Wait()
}

// change registers the service, as applications of many instances do.
func (n *nacos) change(ctx context.Context, s *service, _ int) error { return n.register(ctx, s) }

func (n *nacos) follow(ctx context.Context, s *service, told func(time.Time, []int64)) error {
	n.mu.Lock()
	n.told[s.name] = told
	n.mu.Unlock()
	return n.subscriber.Subscribe(ctx, nacosNamespace, nacosGroup, s.name)
}

// push takes what the server tells the bare subscriber.
func (n *nacos) push(s model.Service) {
	at := time.Now()
	var stamps []int64
	for _, i := range s.Hosts {
		if stamp, err := strconv.ParseInt(i.Metadata[sim.ChangedAt], 10, 64); err == nil {
			stamps = append(stamps, stamp)
		}
	}
	n.mu.Lock()
	told := n.told[s.Name[strings.LastIndexByte(s.Name, '@')+1:]]
	n.mu.Unlock()
	if told != nil {
		told(at, stamps)
	}
}

// requests is 0: Nacos has no count of what one program sends.
func (n *nacos) requests(context.Context) (float64, error) { return 0, nil }

// clear ends the connection, and with it what was registered.
func (n *nacos) clear(context.Context) error {
	n.app.Close()
	n.subscriber.Close()
	return nil
}
