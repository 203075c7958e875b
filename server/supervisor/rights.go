package supervisor

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/user"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"aead.dev/minisign"

	"github.com/isthmus-mesh/isthmus/internal/clip"
)

// passed are the variables of the bridge's environment that every plugin gets:
// where it finds programs, temporary files, time zone and authorities of
// certificates, how it reaches servers, and how Go's runtime behaves. Any other
// one may hold a secret and has to be named.
var passed = []string{
	"PATH", "HOME", "USER", "TMPDIR", "TZ", "ZONEINFO", "LANG", "LC_ALL", "LC_CTYPE",
	"SSL_CERT_FILE", "SSL_CERT_DIR",
	"HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "no_proxy", "all_proxy",
	"LOCALDOMAIN", "RES_OPTIONS", "HOSTALIASES",
	"GODEBUG", "GOGC", "GOMEMLIMIT", "GOMAXPROCS", "GORACE",
}

// environ returns the part of the bridge's environment that a plugin gets.
func environ(names []string) (out []string) {
	for _, v := range os.Environ() {
		name, _, _ := strings.Cut(v, "=")
		if slices.Contains(passed, name) || slices.Contains(names, name) {
			out = append(out, v)
		}
	}
	return out
}

// credential returns the user that the plugin's process is to run as, nil for
// the bridge's own. A user that the bridge cannot change to is an error of the
// configuration.
func credential(name string) (*syscall.Credential, error) {
	if name == "" {
		return nil, nil
	}
	refused := func(format string, args ...any) (*syscall.Credential, error) {
		return nil, &ConfigError{[]Violation{{Field: "plugin.user", Reason: fmt.Sprintf(format, args...)}}}
	}
	u, err := user.Lookup(name)
	if err != nil {
		u, err = user.LookupId(name)
	}
	if err != nil {
		return refused("there is no user %q on this machine", name)
	}
	uid, uerr := strconv.ParseUint(u.Uid, 10, 32)
	gid, gerr := strconv.ParseUint(u.Gid, 10, 32)
	if err := errors.Join(uerr, gerr); err != nil {
		return refused("%q: %v", name, err)
	}
	switch own := os.Geteuid(); {
	case own == 0:
		return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, nil // no further groups
	case uint64(own) != uid:
		return refused("the bridge runs as user %d, and only root can start a plugin as user %q; leave it out, or start the bridge as root", own, name)
	}
	return nil, nil
}

// give lets the user of a plugin make its socket.
func (c *client) give(cred *syscall.Credential) error {
	if cred == nil {
		return nil
	}
	// The directory of the host may be passed through, and not listed.
	return errors.Join(os.Chmod(c.process.host.dir, 0o711), os.Chown(c.dir, int(cred.Uid), int(cred.Gid)))
}

// SignatureSuffix is added to the name of an executable for that of the file
// with its signature.
const SignatureSuffix = ".minisig"

// maxExecutable bounds an executable that is pinned, in bytes: it is in memory
// while its process runs.
const maxExecutable = 512 << 20

// pin makes a command execute what was verified, if the executable has to have
// a checksum or a signature: a copy that nobody else can write, as the file may
// be exchanged between check and start. The file that it returns has to be open
// until the process has started; it is nil if nothing is to be verified.
func pin(spec Spec, cmd *exec.Cmd, dir string) (copied *os.File, err error) {
	sum, err := spec.checksum()
	if err != nil || sum == nil && spec.PublicKey == "" {
		return nil, err
	}
	path := cmd.Path
	key, err := spec.key()
	if err != nil {
		return nil, err
	}
	var signature []byte
	if spec.PublicKey != "" {
		if signature, err = os.ReadFile(path + SignatureSuffix); err != nil {
			return nil, fmt.Errorf("%s: %w: %w", path, ErrSignature, err)
		}
	}
	from, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer from.Close()
	hash, signed := sha256.New(), minisign.NewReader(from)
	copied, err = private(cmd, dir, io.TeeReader(io.LimitReader(signed, maxExecutable+1), hash))
	if err != nil {
		return nil, fmt.Errorf("copy of %s, to execute what is verified: %w", path, err)
	}
	info, err := copied.Stat()
	switch {
	case err != nil:
	case info.Size() > maxExecutable:
		err = fmt.Errorf("%s: a pinned executable may have %s", path, size(maxExecutable))
	case sum != nil && !bytes.Equal(hash.Sum(nil), sum):
		err = fmt.Errorf("%s: %w; if the file was changed on purpose, change sha256 too", path, ErrChecksum)
	case spec.PublicKey != "" && !signed.Verify(key, signature):
		err = fmt.Errorf("%s: %w; if the file was changed on purpose, sign it: minisign -S -m %s", path, ErrSignature, path)
	}
	if err != nil {
		return nil, errors.Join(err, copied.Close())
	}
	cmd.Env = append(cmd.Env, PathKey+"="+path)
	return copied, nil
}

// PathKey is the variable that tells a pinned plugin the path that it was
// verified at: a script finds what is beside it there.
const PathKey = "ISTHMUS_PLUGIN_PATH"

// ConfinementRequired is the value of [Spec.Confinement] for a registry that is
// not followed without confinement.
const ConfinementRequired = "required"

// confined returns a [*ConfigError] if confinement is required and the plugin
// does not say that it is confined, or the kernel knows of no filter that it
// has beyond those of the bridge.
func (c *client) confined(spec Spec) error {
	if spec.Confinement != ConfinementRequired {
		return nil
	}
	why := ""
	switch {
	case c.process == nil: // see Spec.Open
	case len(c.confinement) == 0:
		why = "the adapter does not do that"
	case filters(c.process.pid) <= filters(os.Getpid()):
		why = "the process says that it is confined, and has no filter of system calls of its own"
	}
	if why == "" {
		return nil
	}
	return &ConfigError{[]Violation{{Field: "plugin.confinement", Reason: "is required, and " + why}}}
}

// maxPhrases bounds what a plugin says of its confinement.
const maxPhrases, maxPhrase = 10, 1000

// inForce describes the rights of the process, for display.
func (c *client) inForce(spec Spec) []string {
	if c.process == nil { // see Spec.Open
		return nil
	}
	out := inForce(c.process.pid)
	switch {
	case spec.Unconfined:
		out = append(out, "not confined: plugin.confine is false")
	case len(c.confinement) == 0:
		out = append(out, "not confined: the adapter does not do that")
	}
	for _, phrase := range c.confinement[:min(len(c.confinement), maxPhrases)] {
		out = append(out, clip.Text(phrase, maxPhrase))
	}
	return out
}

// size returns a number of bytes for people, exact if it is not a whole MiB.
func size(n int) string {
	switch {
	case n > 0 && n%(1<<30) == 0:
		return fmt.Sprintf("%d GiB", n>>30)
	case n > 0 && n%(1<<20) == 0:
		return fmt.Sprintf("%d MiB", n>>20)
	}
	return fmt.Sprintf("%d bytes", n)
}
