package bench

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/prometheus/procfs"

	"github.com/isthmus-mesh/isthmus/adapters/sim"
)

// bridge is a running bridge.
type bridge struct {
	cmd           *exec.Cmd
	file          string // its configuration
	xds, mcp, adm string // addresses
	shards        []string
	mu            sync.Mutex
	plugin        int      // process, of the plugin started last
	lines         []string // last lines of the log
	ended         chan struct{}
	endedWith     error
	pluginStarted chan struct{}
}

// configuration returns the file of a bridge with a sim registry, or with a
// real one, for which changing has no meaning. Nothing changes if it is false.
// The changes are of kinds that leave an instance behind, which carries their
// time.
func configuration(dir string, shards []string, o Options, changing bool) string {
	block := map[string]any{"stamp": true}
	switch {
	case len(o.Flags) > 0 && changing:
		block["flags"] = o.Flags
	case len(o.Flags) > 0:
		block["flags"] = append(slices.Clone(o.Flags), never)
	default:
		block["services"], block["instances"], block["changes_per_second"] = o.Services, o.Instances, 0
		block["changes"] = sim.Changes{Weight: 1, Label: 1}
		if changing {
			block["changes_per_second"] = o.Rate
		}
	}
	if changing {
		block["changes_total"] = o.total()
	}
	registry := map[string]any{"type": "sim", "config": block}
	if o.upstream != nil {
		registry = o.upstream.server.registry()
	}
	registry["name"] = "bench"
	var xds any = "127.0.0.1:0"
	if len(shards) > 0 {
		var all []any
		for i, address := range shards {
			all = append(all, map[string]any{"address": address, "view": map[string]any{"shard": fmt.Sprintf("%d/%d", i, len(shards))}})
		}
		xds = all
	}
	text, _ := json.Marshal(map[string]any{ // text and numbers only
		"listen":     map[string]any{"xds": xds, "admin": "127.0.0.1:0", "mcp": "127.0.0.1:0"},
		"log":        map[string]any{"format": "json"},
		"admin":      map[string]any{"pprof": o.Profile != ""},
		"state":      map[string]any{"dir": filepath.Join(dir, "state")},
		"registries": []any{registry},
	})
	return string(text)
}

// never is the load flag for changes that do not come while anyone waits.
const never = "--mockPushDelay=1000000000000000"

// startBridge starts a program as a bridge, in a folder of its own.
func startBridge(ctx context.Context, program, dir string, o Options) (*bridge, error) {
	b := &bridge{file: filepath.Join(dir, "isthmus.yaml"), ended: make(chan struct{}), pluginStarted: make(chan struct{}, 100)}
	var err error
	if b.shards, err = freePorts(o.Shards); err != nil {
		return nil, err
	}
	if err := b.configure(o, false); err != nil {
		return nil, err
	}
	b.cmd = exec.CommandContext(ctx, program, "serve", "--config", b.file)
	b.cmd.Cancel = func() error { return b.cmd.Process.Signal(syscall.SIGTERM) }
	b.cmd.WaitDelay = 20 * time.Second
	log, err := b.cmd.StderrPipe()
	if err != nil {
		return nil, err
	}
	if err := b.cmd.Start(); err != nil {
		return nil, err
	}
	serving := make(chan struct{})
	read := make(chan struct{})
	go func() {
		defer close(read)
		b.follow(log, serving)
	}()
	go func() {
		<-read
		b.endedWith = b.cmd.Wait()
		close(b.ended)
	}()
	select {
	case <-serving:
		return b, b.awaitPlugin(ctx)
	case <-b.ended:
		return nil, b.failure()
	}
}

// freePorts returns addresses on which nothing listens.
func freePorts(n int) (addresses []string, err error) {
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		defer l.Close()
		addresses = append(addresses, l.Addr().String())
	}
	return addresses, nil
}

// configure writes the bridge's file, which a running bridge reads again.
func (b *bridge) configure(o Options, changing bool) error {
	next := b.file + ".next"
	if err := os.WriteFile(next, []byte(configuration(filepath.Dir(b.file), b.shards, o, changing)), 0o600); err != nil {
		return err
	}
	return os.Rename(next, b.file)
}

// follow reads the log.
func (b *bridge) follow(log io.Reader, serving chan<- struct{}) {
	lines := bufio.NewScanner(log)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var line struct {
			Msg      string
			XDS, MCP string
			Admin    string
			PID      int
		}
		_ = json.Unmarshal(lines.Bytes(), &line)
		b.mu.Lock()
		if b.lines = append(b.lines, lines.Text()); len(b.lines) > 10 {
			b.lines = b.lines[1:]
		}
		switch line.Msg {
		case "serving":
			b.xds, b.mcp, b.adm = line.XDS, line.MCP, line.Admin
			close(serving)
		case "plugin started":
			b.plugin = line.PID
			select {
			case b.pluginStarted <- struct{}{}:
			default:
			}
		}
		b.mu.Unlock()
	}
}

// awaitPlugin waits until another plugin has started.
func (b *bridge) awaitPlugin(ctx context.Context) error {
	select {
	case <-b.pluginStarted:
		return nil
	case <-b.ended:
		return b.failure()
	case <-ctx.Done():
		return ctx.Err()
	}
}

// failure says why the bridge has ended.
func (b *bridge) failure() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return fmt.Errorf("the bridge ended (%w); its last lines:\n%s", errors.Join(b.endedWith, errEnded), strings.Join(b.lines, "\n"))
}

var errEnded = errors.New("isthmus serve")

// change lets changes begin.
func (b *bridge) change(ctx context.Context, o Options) error {
	if err := b.configure(o, true); err != nil {
		return err
	}
	return b.awaitPlugin(ctx)
}

// address is where sinks of a protocol connect to.
func (b *bridge) address(o Options, listener int) string {
	if strings.HasPrefix(o.Protocol, mcp) {
		return b.mcp
	}
	if o.Shards > 0 {
		return b.shards[listener]
	}
	return b.xds
}

func (b *bridge) pids() map[string]int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return map[string]int{"bridge": b.cmd.Process.Pid, "plugin": b.plugin}
}

// stop ends the bridge and waits for it.
func (b *bridge) stop() {
	_ = b.cmd.Process.Signal(syscall.SIGTERM)
	<-b.ended
}

// profile writes a profile of the bridge into a file of a folder.
func (b *bridge) profile(ctx context.Context, folder, name, query string) (err error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+b.adm+"/debug/pprof/"+query, nil)
	if err != nil {
		return err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("profile of the bridge: %s", response.Status)
	}
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return err
	}
	f, err := os.Create(filepath.Join(folder, name))
	if err != nil {
		return err
	}
	_, err = io.Copy(f, response.Body)
	return errors.Join(err, f.Close())
}

// Process is what a process has used while changes went on.
type Process struct {
	// Name is bridge, plugin or sinks.
	Name string `json:"name"`
	// CPU is its processor time in percent of a core.
	CPU float64 `json:"cpu_percent"`
	// Memory is the most that was resident, in bytes.
	Memory int64 `json:"resident_bytes"`
}

// meter samples processes.
type meter struct {
	names []string
	procs []procfs.Proc
	begin []float64
	since time.Time
	most  []int64
}

// resident returns the memory of a process, in bytes; 0 where there is no
// /proc.
func resident(pid int) int64 {
	p, err := procfs.NewProc(pid)
	if err != nil {
		return 0
	}
	stat, err := p.Stat()
	if err != nil {
		return 0
	}
	return int64(stat.ResidentMemory())
}

// newMeter begins to measure. Where there is no /proc it measures nothing.
func newMeter(pids map[string]int) *meter {
	m := &meter{since: time.Now()}
	for _, name := range []string{"bridge", "plugin", "peer", "sinks"} {
		p, err := procfs.NewProc(pids[name])
		if err != nil {
			continue
		}
		stat, err := p.Stat()
		if err != nil {
			continue
		}
		m.names, m.procs = append(m.names, name), append(m.procs, p)
		m.begin, m.most = append(m.begin, stat.CPUTime()), append(m.most, int64(stat.ResidentMemory()))
	}
	return m
}

// sample records how much memory is resident.
func (m *meter) sample() {
	for i, p := range m.procs {
		if stat, err := p.Stat(); err == nil {
			m.most[i] = max(m.most[i], int64(stat.ResidentMemory()))
		}
	}
}

// end returns what was used.
func (m *meter) end() (used []Process) {
	m.sample()
	for i, p := range m.procs {
		if stat, err := p.Stat(); err == nil {
			used = append(used, Process{m.names[i], 100 * (stat.CPUTime() - m.begin[i]) / time.Since(m.since).Seconds(), m.most[i]})
		}
	}
	return used
}
