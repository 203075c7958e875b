package bench

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/isthmus-mesh/isthmus/adapters/sim"
)

// consul is a Consul agent or server.
type consul struct {
	o      Options
	token  string
	client *http.Client
	nodes  int

	mu    sync.Mutex  // guards what is below
	asked []time.Time // answers to queries of our own
}

func newConsul(o Options) (*consul, error) {
	c := &consul{o: o, nodes: o.Services*o.Instances/perNode + 1}
	transport := &http.Transport{ForceAttemptHTTP2: true, MaxIdleConnsPerHost: followed}
	if o.CAFile != "" {
		pem, err := os.ReadFile(o.CAFile)
		if err != nil {
			return nil, err
		}
		pool := x509.NewCertPool()
		if !pool.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("%s: has no certificate", o.CAFile)
		}
		transport.TLSClientConfig = &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}
	}
	if o.TokenFile != "" {
		token, err := os.ReadFile(o.TokenFile)
		if err != nil {
			return nil, err
		}
		c.token = strings.TrimSpace(string(token))
	}
	c.client = &http.Client{Transport: transport}
	return c, nil
}

// perNode is the number of instances on a node.
const perNode = 100

func (c *consul) registry() map[string]any {
	config := map[string]any{"address": c.o.Address, "services": map[string]any{"include": []string{Prefix + "*"}}}
	if c.o.TokenFile != "" {
		config["token_file"] = c.o.TokenFile
	}
	if c.o.CAFile != "" {
		config["tls"] = map[string]any{"ca_file": c.o.CAFile}
	}
	return map[string]any{"type": "consul", "config": config}
}

// call sends a request and returns the body of its answer.
func (c *consul) call(ctx context.Context, method, path string, body any) (_ []byte, header http.Header, err error) {
	var text []byte
	if body != nil {
		if text, err = json.Marshal(body); err != nil {
			return nil, nil, err
		}
	}
	request, err := http.NewRequestWithContext(ctx, method, strings.TrimSuffix(c.o.Address, "/")+path, bytes.NewReader(text))
	if err != nil {
		return nil, nil, err
	}
	if c.token != "" {
		request.Header.Set("X-Consul-Token", c.token)
	}
	response, err := c.client.Do(request)
	if err != nil {
		return nil, nil, err
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %.300s", response.Status, answer)
	}
	return answer, response.Header, err
}

// object is an object of JSON.
type object = map[string]any

// commit sends operations, as many in one transaction as Consul takes.
func (c *consul) commit(ctx context.Context, ops []object) error {
	for some := range slices.Chunk(ops, 64) {
		if _, _, err := c.call(ctx, http.MethodPut, "/v1/txn", some); err != nil {
			return err
		}
	}
	return nil
}

func (c *consul) node(n int) object {
	return object{"Node": fmt.Sprintf("%snode-%d", Prefix, n), "Address": "127.0.0.1"}
}

// set registers an instance. Those of a service are on different nodes.
func (c *consul) set(s *service, i int) object {
	meta := object{"protocol": "http"}
	if s.stamps[i] > 0 {
		meta[sim.ChangedAt] = strconv.FormatInt(s.stamps[i], 10)
	}
	return object{"Service": object{"Verb": "set", "Node": c.node((s.number + i*c.o.Services) / perNode % c.nodes)["Node"], "Service": object{
		"ID": fmt.Sprintf("%s-%d", s.name, i), "Service": s.name, "Address": s.address(i), "Port": 8080, "Meta": meta,
	}}}
}

func (c *consul) put(ctx context.Context, services ...*service) error {
	var ops []object
	for n := range c.nodes {
		ops = append(ops, object{"Node": object{"Verb": "set", "Node": c.node(n)}})
	}
	for _, s := range services {
		for i := range s.stamps {
			ops = append(ops, c.set(s, i))
		}
	}
	return c.commit(ctx, ops)
}

func (c *consul) change(ctx context.Context, s *service, instance int) error {
	return c.commit(ctx, []object{c.set(s, instance)})
}

// clear removes the nodes, and with them what is on them.
func (c *consul) clear(ctx context.Context) error {
	defer c.client.CloseIdleConnections()
	var ops []object
	for n := range c.nodes {
		ops = append(ops, object{"Node": object{"Verb": "delete", "Node": c.node(n)}})
	}
	return c.commit(ctx, ops)
}

var changedAt = regexp.MustCompile(`"` + sim.ChangedAt + `":\s*"(\d{19})"`)

// follow is a blocking query in a loop, as Consul's documentation has it.
func (c *consul) follow(ctx context.Context, s *service, told func(time.Time, []int64)) error {
	for index := "0"; ; {
		answer, header, err := c.call(ctx, http.MethodGet, "/v1/health/service/"+s.name+"?wait=5m&index="+url.QueryEscape(index), nil)
		if err != nil {
			return fmt.Errorf("a query that waits: %w", err)
		}
		at := time.Now()
		c.mu.Lock()
		c.asked = append(c.asked, at)
		c.mu.Unlock()
		index = header.Get("X-Consul-Index")
		var stamps []int64
		for _, m := range changedAt.FindAllSubmatch(answer, -1) {
			if stamp, err := strconv.ParseInt(string(m[1]), 10, 64); err == nil {
				stamps = append(stamps, stamp)
			}
		}
		told(at, stamps)
	}
}

// requests is by Consul's own count of its last ten seconds.
func (c *consul) requests(ctx context.Context) (float64, error) {
	answer, _, err := c.call(ctx, http.MethodGet, "/v1/agent/metrics", nil)
	if err != nil {
		return 0, err
	}
	var metrics struct {
		Samples []struct {
			Name   string
			Count  float64
			Labels map[string]string
		}
	}
	if err := json.Unmarshal(answer, &metrics); err != nil {
		return 0, err
	}
	const interval, perMinute = 10 * time.Second, 6
	n := 0.0
	for _, s := range metrics.Samples {
		if strings.HasSuffix(s.Name, "api.http") && !strings.Contains(s.Labels["path"], "txn") {
			n += s.Count * perMinute
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, at := range slices.Backward(c.asked) {
		if time.Since(at) > interval {
			break
		}
		n -= perMinute
	}
	return max(0, n), nil
}
