package kubernetes

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"runtime"
	"sync"
	"time"

	"golang.org/x/oauth2"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clientauth "k8s.io/client-go/pkg/apis/clientauthentication/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd/api"

	"github.com/isthmus-mesh/isthmus/plugin"
)

const (
	// loginKey is the variable of the environment that makes a process the
	// helper of a login.
	loginKey = "ISTHMUS_KUBERNETES_LOGIN"
	// loginTime bounds one run of the program.
	loginTime = time.Minute
	// forever is how long a token without an end is used, unless the server
	// refuses it.
	forever = 100 * 365 * 24 * time.Hour
)

// login gets tokens of a program, as a kubeconfig asks for. The adapter may
// start none: a helper does, which is started before the adapter gives up its
// rights and runs this one command, whatever the adapter becomes. It ends with
// its standard input. login implements oauth2.TokenSource.
type login struct {
	of  *api.ExecConfig
	cmd *exec.Cmd
	in  io.WriteCloser
	out *json.Decoder // guarded by mu

	mu sync.Mutex
}

// command is the first message to the helper; any later one asks for a run.
type command struct {
	Path      string
	Args, Env []string
}

// answer is what a run came to.
type answer struct {
	Output []byte
	Err    string
}

// startLogin starts the helper of a cluster whose user gets in by a program.
// path is that of the program that the configuration allows.
func startLogin(path string, k *cluster) (*login, error) {
	c := command{Path: path, Args: k.exec.Args}
	for _, v := range k.exec.Env {
		c.Env = append(c.Env, v.Name+"="+v.Value)
	}
	info := clientauth.ExecCredential{TypeMeta: metav1.TypeMeta{Kind: "ExecCredential", APIVersion: k.exec.APIVersion}}
	if k.exec.ProvideClusterInfo {
		config := rest.CopyConfig(k.config)
		config.ExecProvider = k.exec
		t, err := rest.ConfigToExecCluster(config)
		if err != nil {
			return nil, err
		}
		info.Spec.Cluster = &clientauth.Cluster{}
		if err := clientauth.Convert_clientauthentication_Cluster_To_v1_Cluster(t, info.Spec.Cluster, nil); err != nil {
			return nil, err
		}
	}
	text, err := json.Marshal(info)
	if err != nil {
		return nil, err
	}
	c.Env = append(c.Env, "KUBERNETES_EXEC_INFO="+string(text))
	self := "/proc/self/exe" // what runs, also if it is a sealed copy in memory
	if runtime.GOOS != "linux" {
		if self, err = os.Executable(); err != nil {
			return nil, err
		}
	}
	l := &login{of: k.exec, cmd: exec.Command(self, os.Args[1:]...)} //nolint:gosec // which is this program
	l.cmd.Env = append(os.Environ(), loginKey+"=1")
	l.cmd.Stderr = os.Stderr
	out, err := l.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	l.out = json.NewDecoder(out)
	if l.in, err = l.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	if err := l.cmd.Start(); err != nil {
		return nil, err
	}
	return l, json.NewEncoder(l.in).Encode(c)
}

// stop ends the helper, and waits for it.
func (l *login) stop() {
	_ = l.in.Close()
	_ = l.cmd.Wait()
}

// fits reports whether the helper runs what a kubeconfig asks for.
func (l *login) fits(e *api.ExecConfig) bool { return reflect.DeepEqual(l.of, e) }

// Token implements oauth2.TokenSource: it runs the program.
func (l *login) Token() (*oauth2.Token, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	var a answer
	if err := cmp.Or(json.NewEncoder(l.in).Encode(struct{}{}), l.out.Decode(&a)); err != nil {
		return nil, fmt.Errorf("the helper of the login has ended: %w", err)
	}
	if a.Err != "" {
		return nil, fmt.Errorf("%s: %s", filepath.Base(l.of.Command), a.Err)
	}
	var c clientauth.ExecCredential
	// An error of the decoder may quote the token.
	if json.Unmarshal(a.Output, &c) != nil || c.Status == nil || c.Status.Token == "" {
		return nil, fmt.Errorf("%s prints no ExecCredential with a token", filepath.Base(l.of.Command))
	}
	t := &oauth2.Token{AccessToken: c.Status.Token, Expiry: time.Now().Add(forever)}
	if c.Status.ExpirationTimestamp != nil {
		t.Expiry = c.Status.ExpirationTimestamp.Time
	}
	return t, nil
}

// help is the helper: it runs the command of its first message once for each
// later one.
func help(stdin io.Reader, stdout io.Writer) {
	in, out := json.NewDecoder(stdin), json.NewEncoder(stdout)
	var c command
	err := in.Decode(&c)
	for ask := struct{}{}; err == nil; {
		if err = in.Decode(&ask); err == nil {
			err = out.Encode(c.run())
		}
	}
}

func (c command) run() (a answer) {
	ctx, cancel := context.WithTimeout(context.Background(), loginTime) //nolint:usetesting // of a process of its own
	defer cancel()
	cmd := exec.CommandContext(ctx, c.Path, c.Args...) //nolint:gosec // which the configuration allows
	cmd.Env = append(os.Environ(), c.Env...)
	cmd.WaitDelay = time.Second
	var complaint bytes.Buffer
	cmd.Stderr = &complaint
	output, err := cmd.Output()
	if a.Output = output; err != nil {
		a.Output, a.Err = nil, fmt.Sprintf("%v: %s", err, plugin.Excerpt(complaint.String()))
	}
	return a
}

// checkExec checks what a kubeconfig asks to start against the program that the
// configuration allows.
func checkExec(of *api.ExecConfig, allowed string) error {
	switch {
	case allowed == "":
		return fmt.Errorf("the user gets in by the program %s; allow it by its path in exec, or make a service account, and set its token, or tokenFile", of.Command)
	case filepath.Base(of.Command) != filepath.Base(allowed):
		return fmt.Errorf("the user gets in by the program %s, and exec allows %s only", of.Command, allowed)
	case of.InteractiveMode == api.AlwaysExecInteractiveMode:
		return errors.New("the user's program asks a person (interactiveMode: Always)")
	}
	return nil
}
