package deploy

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testisthmus"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testkube"
)

// within is set where a test runs in a network of its own.
const within = "ISTHMUS_TEST_NETWORK"

// private runs the test once more, in a network and with mounts and process
// ids of its own, so that pods have the addresses and ports that a cluster
// gives them. It reports whether this is that run; what the run prints is
// returned to the other one. It needs root.
func private(t testing.TB, name string, tools ...testenv.Tool) (out string, inside bool) {
	t.Helper()
	if os.Getenv(within) != "" {
		return "", true
	}
	if os.Geteuid() != 0 {
		t.Fatal("a network for pods needs root")
	}
	// There, nothing can be fetched.
	for _, tool := range tools {
		if _, err := tool.Fetch(t.Context(), t.Output()); err != nil {
			t.Fatal(err)
		}
	}
	testisthmus.Binary(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	var text strings.Builder
	cmd := exec.CommandContext(t.Context(), "unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc",
		self, "-test.run=^"+name+"$", "-test.v", "-test.count=1")
	cmd.Env = append(os.Environ(), within+"=1")
	cmd.Stdout, cmd.Stderr = io.MultiWriter(&text, t.Output()), t.Output()
	if err := cmd.Run(); err != nil {
		t.Fatalf("the test in a network of its own: %v", err)
	}
	return text.String(), false
}

// gateway is where pods reach what runs beside them, and machine another
// address there.
const gateway, machine = "10.244.0.1", "10.244.0.254"

// node is what a cluster has besides its control plane: it runs the pods of a
// namespace, each with an address, files and a user of its own, mounts the
// ConfigMaps that they name and the token of their service account where they
// want it, asks their probes, and forwards the addresses of services to
// endpoints. Every image is the program, and the only names are those of
// services.
type node struct {
	kube    *testkube.Server
	program string
	dir     string
	client  *http.Client

	mu    sync.Mutex
	pods  map[string]*pod // by uid
	hosts map[string]string
	next  int
}

type pod struct {
	dir, address string
	cmd          *exec.Cmd
	ended        chan struct{} // closed once the program has ended
	configs      map[string]string
	status       string
}

type podObject struct {
	Metadata struct {
		Name, Namespace, UID string
		DeletionTimestamp    string
	}
	Spec struct {
		NodeName                     string
		ServiceAccountName           string
		AutomountServiceAccountToken bool
		SecurityContext              struct{ RunAsUser, RunAsGroup, FSGroup int }
		Containers                   []struct {
			Args  []string
			Env   []struct{ Name, Value string }
			Ports []struct {
				Name          string
				ContainerPort int
			}
			ReadinessProbe, LivenessProbe probe
			SecurityContext               struct{ ReadOnlyRootFilesystem bool }
			VolumeMounts                  []struct{ Name, MountPath string }
		}
		Volumes []struct {
			Name      string
			ConfigMap struct{ Name string }
		}
	}
}

type probe struct {
	HTTPGet struct{ Path, Port, Scheme string }
	Exec    struct{ Command []string }
}

// startNode makes the network, and a node of the cluster that runs until the
// end of the test.
func startNode(t *testing.T, kube *testkube.Server, namespace string) *node {
	t.Helper()
	n := &node{
		kube: kube, program: testisthmus.Binary(t), dir: t.TempDir(), pods: map[string]*pod{},
		hosts: map[string]string{}, client: &http.Client{Timeout: 5 * time.Second},
	}
	kube.Apply(t, "{apiVersion: v1, kind: Node, metadata: {name: n1}}")
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	var last error
	// Owned by the test; ends with it.
	running.Go(func() {
		for tick := time.NewTicker(100 * time.Millisecond); ; {
			select {
			case <-ctx.Done():
				tick.Stop()
				return
			case <-tick.C:
			}
			// What cannot be done now, as an object is not there yet or not
			// any more, is tried again.
			if err := n.sync(ctx, namespace); err != nil && ctx.Err() == nil {
				last = err
			}
		}
	})
	t.Cleanup(func() {
		cancel()
		running.Wait()
		if t.Failed() {
			t.Logf("the node's last error: %v", last)
		}
		for _, p := range n.pods {
			_ = p.cmd.Process.Kill()
			<-p.ended
			if t.Failed() {
				log, _ := os.ReadFile(filepath.Join(p.dir, "log"))
				t.Logf("---- the pod at %s\n%s", p.address, log[max(0, len(log)-4000):])
			}
		}
		n.client.CloseIdleConnections()
	})
	return n
}

// network makes the network of the pods, in the one of the test.
func network(t *testing.T) {
	t.Helper()
	shell(t, `
mount -t tmpfs tmpfs /run
cp /etc/hosts /run/hosts
mount --bind /run/hosts /etc/hosts
ip link set lo up
ip link add pods type bridge
ip addr add `+gateway+`/24 dev pods
ip addr add `+machine+`/24 dev pods
ip link set pods up
echo 1 > /proc/sys/net/ipv4/ip_forward
`)
}

func shell(t *testing.T, script string) {
	t.Helper()
	if out, err := command(t, "sh", ".", "-e", "-c", script).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", script, err, out)
	}
}

// get reads an object or a list.
func (n *node) get(ctx context.Context, path string, into any) error {
	body, code, err := n.kube.Do(ctx, http.MethodGet, path, "", "", nil)
	if err == nil && code != http.StatusOK {
		err = fmt.Errorf("status %d: %.300s", code, body)
	}
	if err == nil {
		err = json.Unmarshal(body, into)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

// sync does what is to be done now.
func (n *node) sync(ctx context.Context, namespace string) error {
	if err := n.services(ctx); err != nil {
		return err
	}
	var list struct{ Items []podObject }
	if err := n.get(ctx, "/api/v1/namespaces/"+namespace+"/pods", &list); err != nil {
		return err
	}
	var errs []error
	for _, o := range list.Items {
		if err := n.syncPod(ctx, o); err != nil {
			errs = append(errs, fmt.Errorf("pod %s: %w", o.Metadata.Name, err))
		}
	}
	return errors.Join(errs...)
}

func (n *node) syncPod(ctx context.Context, o podObject) error {
	path := "/api/v1/namespaces/" + o.Metadata.Namespace + "/pods/" + o.Metadata.Name
	// do ignores that the pod has gone or has changed meanwhile.
	do := func(method, path, contentType string, body any) error {
		answer, code, err := n.kube.Do(ctx, method, path, "", contentType, body)
		if err == nil && code >= 300 && code != http.StatusNotFound && code != http.StatusConflict {
			err = fmt.Errorf("%s %s: status %d: %s", method, path, code, answer)
		}
		return err
	}
	n.mu.Lock()
	p := n.pods[o.Metadata.UID]
	n.mu.Unlock()
	switch {
	case o.Metadata.DeletionTimestamp != "":
		if p != nil {
			if err := p.cmd.Process.Signal(syscall.SIGTERM); err == nil {
				break // until the program has ended
			}
			<-p.ended
		}
		return do(http.MethodDelete, path, "", map[string]any{"gracePeriodSeconds": 0, "preconditions": map[string]any{"uid": o.Metadata.UID}})
	case o.Spec.NodeName == "":
		return do(http.MethodPost, path+"/binding", "", map[string]any{
			"apiVersion": "v1", "kind": "Binding", "metadata": map[string]any{"name": o.Metadata.Name}, "target": map[string]any{"kind": "Node", "name": "n1"},
		})
	case p == nil:
		return n.start(ctx, o)
	}
	unmounted := n.mount(ctx, o, p)
	ready := "False"
	c := o.Spec.Containers[0]
	if n.probe(ctx, o, p, c.LivenessProbe) && n.probe(ctx, o, p, c.ReadinessProbe) {
		ready = "True"
	}
	if p.status == ready {
		return unmounted
	}
	p.status = ready
	conditions := []any{}
	for _, kind := range []string{"PodScheduled", "Initialized", "ContainersReady", "Ready"} {
		status := "True"
		if strings.HasSuffix(kind, "Ready") {
			status = ready
		}
		conditions = append(conditions, map[string]any{"type": kind, "status": status, "lastTransitionTime": time.Now().UTC().Format(time.RFC3339)})
	}
	return do(http.MethodPatch, path+"/status", "application/merge-patch+json", map[string]any{"status": map[string]any{
		"phase": "Running", "podIP": p.address, "podIPs": []any{map[string]any{"ip": p.address}}, "conditions": conditions,
	}})
}

func (n *node) probe(ctx context.Context, o podObject, p *pod, ask probe) bool {
	if len(ask.Exec.Command) > 0 {
		return p.exec(ctx, n.program, ask.Exec.Command[1:]...).Run() == nil
	}
	get := ask.HTTPGet
	for _, port := range o.Spec.Containers[0].Ports {
		if port.Name != get.Port {
			continue
		}
		url := strings.ToLower(get.Scheme) + "://" + net.JoinHostPort(p.address, strconv.Itoa(port.ContainerPort)) + get.Path
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return false
		}
		res, err := n.client.Do(req)
		if err != nil {
			return false
		}
		res.Body.Close()
		return res.StatusCode == http.StatusOK
	}
	return false
}

// exec returns a program in the network of a pod.
func (p *pod) exec(ctx context.Context, program string, args ...string) *exec.Cmd {
	return exec.CommandContext(ctx, "ip", append([]string{"netns", "exec", filepath.Base(p.dir), program}, args...)...)
}

// mount writes the ConfigMaps that a pod mounts, as a node does: a new folder,
// to which a link is moved.
func (n *node) mount(ctx context.Context, o podObject, p *pod) error {
	for _, v := range o.Spec.Volumes {
		dir := filepath.Join(p.dir, v.Name)
		if v.ConfigMap.Name == "" {
			continue
		}
		var object struct {
			Metadata struct{ ResourceVersion string }
			Data     map[string]string
		}
		if err := n.get(ctx, "/api/v1/namespaces/"+o.Metadata.Namespace+"/configmaps/"+v.ConfigMap.Name, &object); err != nil {
			return err
		}
		if p.configs[v.Name] == object.Metadata.ResourceVersion {
			continue
		}
		p.configs[v.Name] = object.Metadata.ResourceVersion
		version := "..version-" + object.Metadata.ResourceVersion
		if err := os.MkdirAll(filepath.Join(dir, version), 0o755); err != nil {
			return err
		}
		for file, text := range object.Data {
			if err := os.WriteFile(filepath.Join(dir, version, file), []byte(text), 0o644); err != nil { //nolint:gosec // as a node does
				return err
			}
			if err := os.Symlink(filepath.Join("..data", file), filepath.Join(dir, file)); err != nil && !os.IsExist(err) {
				return err
			}
		}
		next := filepath.Join(dir, "..next")
		if err := os.Symlink(version, next); err != nil {
			return err
		}
		if err := os.Rename(next, filepath.Join(dir, "..data")); err != nil {
			return err
		}
	}
	return nil
}

const (
	// accountDir is where a pod has its token.
	accountDir = "/var/run/secrets/kubernetes.io/serviceaccount"
	// apiAddress is the address of the service of the API server.
	apiAddress = "10.96.0.1"
)

// account writes the token of a pod's service account, and returns the folder.
func (n *node) account(ctx context.Context, p *pod, o podObject) (dir string, err error) {
	answer, code, err := n.kube.Do(ctx, http.MethodPost, "/api/v1/namespaces/"+o.Metadata.Namespace+"/serviceaccounts/"+o.Spec.ServiceAccountName+"/token", "", "",
		map[string]any{"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": map[string]any{"expirationSeconds": 3600}})
	if err == nil && code >= 300 {
		err = fmt.Errorf("a token: status %d: %.300s", code, answer)
	}
	var request struct{ Status struct{ Token string } }
	if err == nil {
		err = json.Unmarshal(answer, &request)
	}
	if err != nil {
		return "", err
	}
	ca, err := os.ReadFile(n.kube.CAFile)
	if err != nil {
		return "", err
	}
	dir = filepath.Join(p.dir, "..account") // the name of no volume
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	for file, text := range map[string]string{"token": request.Status.Token, "ca.crt": string(ca), "namespace": o.Metadata.Namespace} {
		if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o644); err != nil { //nolint:gosec // as a node does
			return "", err
		}
	}
	return dir, nil
}

// start starts the program of a pod.
func (n *node) start(ctx context.Context, o podObject) error {
	n.next++
	name := fmt.Sprintf("pod%d", n.next)
	p := &pod{dir: filepath.Join(n.dir, name), address: fmt.Sprintf("10.244.0.%d", n.next+1), ended: make(chan struct{}), configs: map[string]string{}}
	for _, v := range o.Spec.Volumes {
		dir := filepath.Join(p.dir, v.Name)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
		// What the pod's user may write in.
		if v.ConfigMap.Name == "" {
			if err := os.Chmod(dir, 0o777); err != nil {
				return err
			}
		}
	}
	if err := n.mount(ctx, o, p); err != nil {
		return err
	}
	c, user := o.Spec.Containers[0], o.Spec.SecurityContext
	root := filepath.Join(p.dir, "root")
	script := fmt.Sprintf(`
ip netns add %[1]s
ip link add %[1]s type veth peer name eth0 netns %[1]s
ip link set %[1]s master pods up
ip -n %[1]s link set lo up
ip -n %[1]s addr add %[2]s/24 dev eth0
ip -n %[1]s link set eth0 up
ip -n %[1]s route add default via %[3]s
exec ip netns exec %[1]s sh -e -c '
mkdir -p %[4]s/etc
mount --bind %[4]s %[4]s
touch %[4]s/isthmus %[4]s/etc/hosts
mount --bind %[5]s %[4]s/isthmus
mount --bind /etc/hosts %[4]s/etc/hosts
for d in usr lib lib64 dev proc; do [ ! -e /$d ] || { mkdir -p %[4]s/$d; mount --rbind /$d %[4]s/$d; }; done
`, name, p.address, gateway, root, n.program)
	for _, m := range c.VolumeMounts {
		script += fmt.Sprintf("mkdir -p %[1]s%[2]s\nmount --bind %[3]s %[1]s%[2]s\n", root, m.MountPath, filepath.Join(p.dir, m.Name))
	}
	env := []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}
	if o.Spec.AutomountServiceAccountToken {
		dir, err := n.account(ctx, p, o)
		if err != nil {
			return err
		}
		script += fmt.Sprintf("mkdir -p %[1]s%[2]s\nmount --bind %[3]s %[1]s%[2]s\n", root, accountDir, dir)
		env = append(env, "KUBERNETES_SERVICE_HOST="+apiAddress, "KUBERNETES_SERVICE_PORT=443")
	}
	if c.SecurityContext.ReadOnlyRootFilesystem {
		script += "mount -o remount,bind,ro " + root + "\n"
	}
	for _, e := range c.Env {
		env = append(env, e.Name+"="+e.Value)
	}
	script += fmt.Sprintf(`exec env -i "$@"' sh %s chroot %s /usr/bin/setpriv --reuid=%d --regid=%d --groups=%d --no-new-privs --bounding-set=-all --inh-caps=-all /isthmus "$@"`,
		strings.Join(env, " "), root, user.RunAsUser, user.RunAsGroup, user.FSGroup)
	log, err := os.Create(filepath.Join(p.dir, "log"))
	if err != nil {
		return err
	}
	defer log.Close()
	// It outlives ctx of this call, until the test ends it.
	p.cmd = exec.Command("sh", append([]string{"-e", "-c", script, "sh"}, c.Args...)...)
	p.cmd.Stdout, p.cmd.Stderr = log, log
	if err := p.cmd.Start(); err != nil {
		return err
	}
	// Owned by the node; ends with the program.
	go func() {
		_ = p.cmd.Wait()
		close(p.ended)
	}()
	n.mu.Lock()
	defer n.mu.Unlock()
	n.pods[o.Metadata.UID] = p
	return nil
}

// services gives each service its address and its name.
func (n *node) services(ctx context.Context) error {
	var list struct {
		Items []struct {
			Metadata struct{ Name, Namespace string }
			Spec     struct {
				ClusterIP string
				Ports     []struct {
					Name string
					Port int
				}
			}
		}
	}
	if err := n.get(ctx, "/api/v1/services", &list); err != nil {
		return err
	}
	for _, s := range list.Items {
		name := s.Metadata.Name + "." + s.Metadata.Namespace + ".svc"
		if n.hosts[name] == s.Spec.ClusterIP {
			continue
		}
		n.hosts[name] = s.Spec.ClusterIP
		if out, err := exec.CommandContext(ctx, "ip", "addr", "replace", s.Spec.ClusterIP+"/32", "dev", "lo").CombinedOutput(); err != nil {
			return fmt.Errorf("the address of %s: %w: %s", name, err, out)
		}
		for _, port := range s.Spec.Ports {
			l, err := net.Listen("tcp", net.JoinHostPort(s.Spec.ClusterIP, strconv.Itoa(port.Port)))
			if err != nil {
				return err
			}
			// Owned by the node; ends with the test, as what it forwards does.
			context.AfterFunc(ctx, func() { l.Close() })
			go n.forward(ctx, l, s.Metadata.Namespace, s.Metadata.Name, port.Name)
		}
		lines := "127.0.0.1 localhost\n"
		for host, address := range n.hosts {
			lines += address + " " + host + "\n"
		}
		if err := os.WriteFile("/etc/hosts", []byte(lines), 0o644); err != nil { //nolint:gosec // everybody reads it
			return err
		}
	}
	return nil
}

// forward gives each connection to one of a service's endpoints.
func (n *node) forward(ctx context.Context, l net.Listener, namespace, service, port string) {
	for {
		client, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer client.Close()
			context.AfterFunc(ctx, func() { client.Close() })
			addresses, err := n.endpoints(ctx, namespace, service, port)
			if err != nil || len(addresses) == 0 {
				return
			}
			server, err := net.Dial("tcp", addresses[rand.IntN(len(addresses))]) //nolint:gosec // any
			if err != nil {
				return
			}
			defer server.Close()
			go func() {
				_, _ = io.Copy(server, client)
				server.Close()
			}()
			_, _ = io.Copy(client, server)
		}()
	}
}

// endpoints returns the ready endpoints of a service's port.
func (n *node) endpoints(ctx context.Context, namespace, service, port string) (addresses []string, err error) {
	var list struct {
		Items []struct {
			Ports []struct {
				Name string
				Port int
			}
			Endpoints []struct {
				Addresses  []string
				Conditions struct{ Ready *bool }
			}
		}
	}
	path := "/apis/discovery.k8s.io/v1/namespaces/" + namespace + "/endpointslices?labelSelector=kubernetes.io/service-name=" + service
	if err := n.get(ctx, path, &list); err != nil {
		return nil, err
	}
	for _, s := range list.Items {
		for _, p := range s.Ports {
			if p.Name != port {
				continue
			}
			for _, e := range s.Endpoints {
				if e.Conditions.Ready == nil || *e.Conditions.Ready {
					addresses = append(addresses, net.JoinHostPort(e.Addresses[0], strconv.Itoa(p.Port)))
				}
			}
		}
	}
	return addresses, nil
}

// running returns the uids of the pods that run.
func (n *node) running() (uids []string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for uid, p := range n.pods {
		select {
		case <-p.ended:
		default:
			uids = append(uids, uid)
		}
	}
	slices.Sort(uids)
	return uids
}
